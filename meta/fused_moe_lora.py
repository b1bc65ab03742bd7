"""Schema, shape contract and fake of `moelora::fused_moe_lora`."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from moelora_ops.checks import (
    COMPUTE_DTYPES,
    Sizes,
    check_count,
    check_device,
    check_dtype,
    check_inner_stride,
    check_positive,
    check_tensor,
    holds,
)

NAME = "fused_moe_lora"
SCHEMA = (
    f"{NAME}(Tensor(a!) output, Tensor hidden_states, Tensor[] lora_a_stacked, Tensor[] lora_b_stacked, Tensor topk_weights, "
    "Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, *, "
    "Tensor? lora_ranks=None, bool mul_routed_weight=False, SymInt offset=0) -> ()"
)


def check(
    output: Tensor,
    hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    lora_ranks: Tensor | None = None,
    mul_routed_weight: bool = False,
    offset: int = 0,
) -> None:
    """Raise ValueError or TypeError for whatever the op cannot serve, before anything is written."""
    sizes = Sizes()
    check_tensor("output", output)
    check_dtype("output", output, COMPUTE_DTYPES)
    sizes.bind("output", output, "T", "K", "out")
    _check_writable(output)
    check_count("output", "pair", output.shape[0] * output.shape[1])
    _check_hidden_states(sizes, hidden_states, output)
    _check_adapters(sizes, lora_a_stacked, lora_b_stacked, hidden_states)
    check_positive("offset", offset, least=0)
    slices, width = len(lora_b_stacked), sizes["N"]
    if holds(offset + slices * width > output.shape[2]):
        raise ValueError(
            f"output dim 2 must be >= offset + slices * N = {offset} + {slices} * {width}, got {output.shape[2]}"
        )
    check_tensor("topk_weights", topk_weights)
    check_dtype("topk_weights", topk_weights, (torch.float32,))
    sizes.bind("topk_weights", topk_weights, "T", "K")
    check_device("topk_weights", topk_weights, "output", output)
    tables: list[tuple[str, Tensor, tuple[str, ...]]] = [
        ("sorted_token_ids", sorted_token_ids, ("L", "EM")),
        ("expert_ids", expert_ids, ("L", "blocks")),
        ("num_tokens_post_padded", num_tokens_post_padded, ("L",)),
    ]
    if lora_ranks is not None:
        tables.append(("lora_ranks", lora_ranks, ("L",)))
    for name, tensor, letters in tables:
        check_tensor(name, tensor)
        check_dtype(name, tensor, (torch.int32,))
        sizes.bind(name, tensor, *letters)
        check_device(name, tensor, "output", output)
    _check_blocks(sizes["EM"], sizes["blocks"])


def _check_writable(output: Tensor) -> None:
    """Rows are contiguous and no element has two addresses (any order of the two outer dimensions)."""
    check_inner_stride("output", output)
    num_tokens, top_k, width = output.shape
    token_stride, choice_stride, _ = output.stride()
    tokens_apart = holds(num_tokens <= 1) or not holds(token_stride < width)
    choices_apart = holds(top_k <= 1) or not holds(choice_stride < width)
    token_blocks_apart = not holds(token_stride < (top_k - 1) * choice_stride + width)
    choice_blocks_apart = not holds(choice_stride < (num_tokens - 1) * token_stride + width)
    one_row_deep = holds(num_tokens <= 1) or holds(top_k <= 1)
    if not (tokens_apart and choices_apart and (one_row_deep or token_blocks_apart or choice_blocks_apart)):
        raise ValueError(
            f"output must not overlap itself, got shape {tuple(output.shape)} with strides {tuple(output.stride())}"
        )


def _check_hidden_states(sizes: Sizes, hidden_states: Tensor, output: Tensor) -> None:
    check_tensor("hidden_states", hidden_states)
    check_dtype("hidden_states", hidden_states, (output.dtype,), " like output")
    sizes.bind("hidden_states", hidden_states, "rows", "in")
    check_device("hidden_states", hidden_states, "output", output)
    check_inner_stride("hidden_states", hidden_states)
    rows, num_tokens, num_pairs = hidden_states.shape[0], output.shape[0], output.shape[0] * output.shape[1]
    if holds(rows != num_tokens) and holds(rows != num_pairs):
        raise ValueError(f"hidden_states dim 0 must be T = {num_tokens} or T * K = {num_pairs} as in output, got {rows}")


def _check_adapters(sizes: Sizes, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], hidden_states: Tensor) -> None:
    if len(lora_a) == 0 or len(lora_a) != len(lora_b):
        raise ValueError(
            f"lora_a_stacked and lora_b_stacked must hold the same number (>= 1) of slices, got {len(lora_a)} and {len(lora_b)}"
        )
    tensors = [(f"lora_a_stacked[{i}]", t, ("L", "E|1", "R", "in")) for i, t in enumerate(lora_a)]
    tensors += [(f"lora_b_stacked[{i}]", t, ("L", "E|1", "N", "R")) for i, t in enumerate(lora_b)]
    _bind_experts(sizes, tensors)
    for name, tensor, letters in tensors:
        check_tensor(name, tensor)
        check_dtype(name, tensor, (hidden_states.dtype,), " like hidden_states")
        sizes.bind(name, tensor, *letters)
        check_device(name, tensor, "hidden_states", hidden_states)
        check_inner_stride(name, tensor)
    check_count("lora_a_stacked[0]", "slot", sizes["L"])


def _bind_experts(sizes: Sizes, tensors: Sequence[tuple[str, Any, Any]]) -> None:
    """E is the first expert dimension that is not 1: a dimension of 1 is shared by all experts."""
    for name, tensor, _ in tensors:
        if isinstance(tensor, Tensor) and tensor.dim() == 4 and not holds(tensor.shape[1] == 1):
            sizes.set("E", tensor.shape[1], name)
            return


def _check_blocks(capacity: int, num_blocks: int) -> None:
    if holds(num_blocks == 0) and holds(capacity == 0):
        return
    if holds(num_blocks == 0) or holds(num_blocks > capacity) or holds(capacity % num_blocks != 0):
        raise ValueError(
            f"expert_ids dim 1 must divide sorted_token_ids dim 1 = {capacity} (their ratio is the block size), "
            f"got {num_blocks}"
        )


def fake(*args: Any, **kwargs: Any) -> None:
    check(*args, **kwargs)
