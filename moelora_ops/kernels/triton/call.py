"""The arguments of the layer op as its kernels take them, and what tells calls apart that need different launches."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from torch import Tensor


class Call(NamedTuple):
    """The arguments of one call, checked, contiguous where they are small; adapters of no slots or ranks are None."""

    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    token_lora_mapping: Tensor
    lora_a13: Tensor | None
    lora_b13: Tensor | None
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_ranks: Tensor | None
    adapter_enabled: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    activation: str
    gated: bool
    interleaved: bool
    swiglu_alpha: float
    swiglu_limit: float | None
    apply_router_weight_on_input: bool
    routed_scaling_factor: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of `TENSORS`."""
        return self[:15]


TENSORS = Call._fields[:15]
_AT = {name: at for at, name in enumerate(TENSORS)}
_ZEROS = (0,) * len(TENSORS)


def key_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[int]]:
    """Whatever the checks and the launches of a call depend on, and the address of each of `TENSORS`, 0 for None.

    That is each tensor's shape, strides (unless it is contiguous: then they do not matter), dtype, device (its number, -1 for
    CPU: the dispatcher brings no other backends here) and alignment to 16 bytes, and every option. Values of tensors are not,
    nor are their addresses otherwise.

    Args: the op's arguments; those by name are part of the key by name, so that leaving out a default may give another key.
    Raises: RuntimeError for a tensor without memory or strides, which no check lets through.
    """
    key: list[Any] = []
    addresses: list[int] = []
    for tensor in args:  # every microsecond here is one of an eager call: no generators, nothing is looked at twice
        if tensor is None:
            key.append(None)
            addresses.append(0)
        else:
            address = tensor.data_ptr()
            strides = tensor.is_contiguous() or tensor.stride()
            key.append((tensor.shape, strides, tensor.dtype, tensor.get_device(), address & 15))
            addresses.append(address)
    addresses.extend(_ZEROS[len(args) :])
    for name, value in kwargs.items():
        if value is not None and name in _AT:
            addresses[_AT[name]] = address = value.data_ptr()
            strides = value.is_contiguous() or value.stride()
            value = (value.shape, strides, value.dtype, value.get_device(), address & 15)
        key.append((name, value))
    return tuple(key), addresses


def prepare(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
    *,
    lora_ranks: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Call:
    """The op's arguments as its kernels take them."""
    if lora_b13 is None or 0 in (lora_b13.shape[0], lora_b13.shape[3]):
        lora_a13 = lora_b13 = None
    if lora_b2 is None or 0 in (lora_b2.shape[0], lora_b2.shape[3]):
        lora_a2 = lora_b2 = None
    return Call(
        hidden_states, w13, w2, topk_weights.contiguous(), topk_ids.contiguous(), token_lora_mapping.contiguous(),
        lora_a13, lora_b13, lora_a2, lora_b2, None if lora_ranks is None else lora_ranks.contiguous(),
        None if adapter_enabled is None else adapter_enabled.contiguous(), w13_bias, w2_bias,
        None if expert_map is None else expert_map.contiguous(),
        activation, gated, interleaved, swiglu_alpha, swiglu_limit, apply_router_weight_on_input, routed_scaling_factor,
    )  # fmt: skip
