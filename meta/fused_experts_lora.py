"""Schema, shape contract and fake of `moelora::fused_experts_lora`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelora_ops.checks import (
    COMPUTE_DTYPES,
    Sizes,
    check_count,
    check_device,
    check_dtype,
    check_enabled,
    check_ids,
    check_inner_stride,
    check_pairs,
    check_tensor,
)

NAME = "fused_experts_lora"
SCHEMA = (
    f"{NAME}(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor token_lora_mapping, "
    "Tensor? lora_a13, Tensor? lora_b13, Tensor? lora_a2, Tensor? lora_b2, *, Tensor? lora_ranks=None, "
    "Tensor? adapter_enabled=None, Tensor? w13_bias=None, Tensor? w2_bias=None, Tensor? expert_map=None, "
    'str activation="silu", bool gated=True, bool interleaved=False, float swiglu_alpha=1.702, float? swiglu_limit=None, '
    "bool apply_router_weight_on_input=False, float routed_scaling_factor=1.0) -> Tensor"
)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")


def check(
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
) -> None:
    """Raise ValueError or TypeError for whatever the op cannot serve; ids out of range are no error."""
    check_activation(activation, gated, interleaved, swiglu_limit)
    sizes = Sizes()
    check_tensor("hidden_states", hidden_states)
    check_dtype("hidden_states", hidden_states, COMPUTE_DTYPES)
    sizes.bind("hidden_states", hidden_states, "T", "H")
    check_inner_stride("hidden_states", hidden_states)
    num_slices = 2 if gated else 1
    _check_base(sizes, hidden_states, w13, w2, num_slices)
    for name, bias, letters in (("w13_bias", w13_bias, ("E", "S*I")), ("w2_bias", w2_bias, ("E", "H"))):
        if bias is not None:
            _check_weight(sizes, name, bias, letters, hidden_states)
    check_tensor("topk_weights", topk_weights)
    check_dtype("topk_weights", topk_weights, (torch.float32,))
    sizes.bind("topk_weights", topk_weights, "T", "K")
    check_device("topk_weights", topk_weights, "hidden_states", hidden_states)
    check_ids(sizes, "topk_ids", topk_ids, ("T", "K"), "hidden_states", hidden_states)
    check_ids(sizes, "token_lora_mapping", token_lora_mapping, ("T",), "hidden_states", hidden_states)
    if expert_map is not None:
        check_ids(sizes, "expert_map", expert_map, ("num_global_experts",), "hidden_states", hidden_states)
        check_pairs(topk_ids, expert_map.shape[0], "the length of expert_map")
    else:
        check_pairs(topk_ids, w13.shape[0], "the experts of w13")
    _check_adapters(sizes, hidden_states, num_slices, lora_a13, lora_b13, lora_a2, lora_b2)
    if lora_ranks is not None:
        check_tensor("lora_ranks", lora_ranks)
        check_dtype("lora_ranks", lora_ranks, (torch.int32,))
        sizes.bind("lora_ranks", lora_ranks, "L")
        check_device("lora_ranks", lora_ranks, "hidden_states", hidden_states)
    if "L" in sizes.known:
        check_count(sizes.known["L"][1], "slot", sizes["L"])
    check_enabled(adapter_enabled, sizes["L"] if "L" in sizes.known else 0, "hidden_states", hidden_states)


def check_activation(activation: str, gated: bool, interleaved: bool, swiglu_limit: float | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if not gated and activation == "swigluoai":
        raise ValueError("activation 'swigluoai' needs gated=True (its formula has an up half), got gated=False")
    if not gated and interleaved:
        raise ValueError("interleaved=True needs gated=True (it orders gate and up rows), got gated=False")
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit must be > 0 or None, got {swiglu_limit}")


def _check_weight(sizes: Sizes, name: str, weight: Tensor, letters: tuple[str, ...], like: Tensor) -> None:
    check_tensor(name, weight)
    check_dtype(name, weight, (like.dtype,), " like hidden_states")
    sizes.bind(name, weight, *letters)
    check_device(name, weight, "hidden_states", like)
    check_inner_stride(name, weight)


def _check_base(sizes: Sizes, hidden_states: Tensor, w13: Tensor, w2: Tensor, num_slices: int) -> None:
    _check_weight(sizes, "w2", w2, ("E", "H", "I"), hidden_states)
    check_count("w2", "expert", w2.shape[0])
    sizes.set("S*I", num_slices * w2.shape[2], f"{num_slices} * dim 2 of w2")
    _check_weight(sizes, "w13", w13, ("E", "S*I", "H"), hidden_states)


def _check_adapters(
    sizes: Sizes,
    hidden_states: Tensor,
    num_slices: int,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
) -> None:
    for a_name, a, b_name, b in (("lora_a13", lora_a13, "lora_b13", lora_b13), ("lora_a2", lora_a2, "lora_b2", lora_b2)):
        if (a is None) != (b is None):
            given, missing = (a_name, b_name) if b is None else (b_name, a_name)
            raise ValueError(f"{missing} must be given together with {given}, got None")
    if lora_b13 is not None and lora_a13 is not None:
        _check_weight(sizes, "lora_b13", lora_b13, ("L", "E", "S*I", "R"), hidden_states)
        sizes.set("S*R", num_slices * lora_b13.shape[3], f"{num_slices} * dim 3 of lora_b13")
        _check_weight(sizes, "lora_a13", lora_a13, ("L", "E|1", "S*R", "H"), hidden_states)
    if lora_b2 is not None and lora_a2 is not None:
        _check_weight(sizes, "lora_b2", lora_b2, ("L", "E|1", "H", "R"), hidden_states)
        _check_weight(sizes, "lora_a2", lora_a2, ("L", "E", "R", "I"), hidden_states)


def fake(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    check(hidden_states, *args, **kwargs)
    return hidden_states.new_empty(hidden_states.shape)
