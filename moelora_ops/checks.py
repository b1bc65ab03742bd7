"""The one plain checker: shapes by symbol, dtypes, devices, layouts.

Real and fake kernels call the same functions, so an error has the same type and text in eager and while tracing. Sizes may be
symbolic: an unbacked size that could be right is given the benefit of the doubt, a known mismatch always raises.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
ID_DTYPES = (torch.int32, torch.int64)
FLAG_DTYPES = (torch.int32, torch.bool)
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def holds(condition: Any) -> bool:
    """`condition` as a bool; False while a symbolic size leaves it open."""
    if condition is True or condition is False:  # by `is`: while Dynamo traces, a symbolic condition passes for a bool
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def short(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(name: str, value: Any) -> None:
    """A plain strided tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must have a strided layout, got {value.layout}")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must have dtype {short(allowed)}{why}, got {short([tensor.dtype])}")


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {tensor.device}")


def check_inner_stride(name: str, tensor: Tensor) -> None:
    """The last dimension is contiguous; all others may be views, slices or expanded."""
    if tensor.dim() and holds(tensor.stride(-1) != 1) and holds(tensor.shape[-1] > 1):
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got stride {tensor.stride(-1)} (call .contiguous())"
        )


def check_positive(name: str, value: int, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if holds(value < least):
        raise ValueError(f"{name} must be >= {least}, got {value}")


class Sizes:
    """Shape letters, bound where they are first seen and compared afterwards.

    >>> sizes = Sizes()
    >>> sizes.bind("hidden_states", torch.empty(5, 64), "T", "H")
    >>> sizes.bind("w2", torch.empty(8, 32, 16), "E", "H", "I")
    Traceback (most recent call last):
    ValueError: w2 dim 1 (H) must be 64 as in hidden_states, got 32
    """

    def __init__(self) -> None:
        self.known: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, letter: str) -> Any:
        return self.known[letter][0]

    def set(self, letter: str, size: Any, source: str) -> None:
        self.known[letter] = (size, source)

    def bind(self, name: str, tensor: Tensor, *letters: str) -> None:
        """Check the rank of `tensor` and each size against its letter; "X|1" also takes a size of one."""
        if tensor.dim() != len(letters):
            want = f"{len(letters)}-dimensional [{', '.join(letters)}]"
            raise ValueError(f"{name} must be {want}, got shape {tuple(tensor.shape)}")
        for dim, letter in enumerate(letters):
            size = tensor.shape[dim]
            letter, _, alternative = letter.partition("|")
            if letter not in self.known:
                self.known[letter] = (size, name)
                continue
            want, source = self.known[letter]
            if holds(size != want) and not (alternative and holds(size == 1)):
                other = " or 1" if alternative else ""
                raise ValueError(f"{name} dim {dim} ({letter}) must be {want}{other} as in {source}, got {size}")


def check_ids(sizes: Sizes, name: str, tensor: Tensor, letters: Sequence[str], like_name: str, like: Tensor) -> None:
    """An int32 or int64 tensor of the given shape on the given device; its values are never an error."""
    check_tensor(name, tensor)
    check_dtype(name, tensor, ID_DTYPES)
    sizes.bind(name, tensor, *letters)
    check_device(name, tensor, like_name, like)


def check_enabled(adapter_enabled: Tensor | None, max_loras: int, like_name: str, like: Tensor) -> None:
    """`adapter_enabled` [>= max_loras] int32 or bool, or None."""
    if adapter_enabled is None:
        return
    check_tensor("adapter_enabled", adapter_enabled)
    check_dtype("adapter_enabled", adapter_enabled, FLAG_DTYPES)
    if adapter_enabled.dim() != 1 or holds(adapter_enabled.shape[0] < max_loras):
        raise ValueError(f"adapter_enabled must have shape [>= {max_loras}], got {tuple(adapter_enabled.shape)}")
    check_device("adapter_enabled", adapter_enabled, like_name, like)


def check_pairs(topk_ids: Tensor, num_experts: Any, experts_name: str) -> None:
    """top_k fits the experts, and pair ids fit int32."""
    num_tokens, top_k = topk_ids.shape
    if holds(top_k > num_experts):
        raise ValueError(f"topk_ids dim 1 (top_k) must be <= {experts_name} = {num_experts}, got {top_k}")
    check_count("topk_ids", "pair", num_tokens * top_k)


def check_count(name: str, what: str, count: Any) -> None:
    """Ids of pairs, experts and slots are int32."""
    if holds(count > INT32_MAX):
        raise ValueError(f"{name} must hold at most {INT32_MAX} {what}s (int32 {what} ids), got {count}")
