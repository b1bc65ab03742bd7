"""The layer op: a whole expert layer with each token's adapter inside."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import native
from ..meta import fused_experts_lora as contract
from . import _library

_NATIVE = native.op(contract.NAME, "cpu")


def _cpu(*args: Any, **kwargs: Any) -> Tensor:
    contract.check(*args, **kwargs)
    return reference.fused_experts_lora(*args, **kwargs)


@cache
def _kernels() -> Any:
    """The Triton kernels, imported on use: without a GPU nothing needs them."""
    from ..kernels.triton import experts

    return experts


def _cuda(*args: Any, **kwargs: Any) -> Tensor:
    experts = _kernels()
    out: Tensor | None = experts.run_known(args, kwargs)
    if out is None:
        contract.check(*args, **kwargs)
        out = experts.fused_experts_lora(*args, **kwargs)
    return out


_OP = _library.register(contract.SCHEMA, check=contract.check, fake=contract.fake, cpu=_cpu, cuda=_cuda)
_library.refuse_backward(_OP, check=contract.check, cpu=_NATIVE or _cpu, cuda=_cuda)


def fused_experts_lora(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_a13: Tensor | None = None,
    lora_b13: Tensor | None = None,
    lora_a2: Tensor | None = None,
    lora_b2: Tensor | None = None,
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
) -> Tensor:
    """Run the expert layer with each token's LoRA adapter inside.

        gu  = W13[e] x + b13[e] + concat_s( B13[l, e, s] (A13[l, e, s] x) )
        h   = act(gu)
        y_k = w * ( W2[e] h + b2[e] + B2[l, e] (A2[l, e] h) )
        out = routed_scaling_factor * sum_k y_k

    for token t, slot l = token_lora_mapping[t] and choice k with e = topk_ids[t, k], w = topk_weights[t, k].

    Args:
        hidden_states: (T, H) fp32, bf16 or fp16.
        w13: (E, S * I, H), dtype of hidden_states; rows [gate | up], or alternating when `interleaved`; S = 2 gated, 1 not.
        w2: (E, H, I).
        topk_weights: (T, K) fp32.
        topk_ids: (T, K) int32 or int64; an id outside [0, E) contributes nothing at all.
        token_lora_mapping: (T,) int32 or int64; -1 or outside [0, L): the base layer for that token.
        lora_a13: (L, E or 1, S * R, H): gate's A in rows 0..R, up's in rows R..2R (also when `interleaved`).
        lora_b13: (L, E, S * I, R), rows ordered like w13; the scaling alpha / r is folded in.
        lora_a2: (L, E, R, I). lora_b2: (L, E or 1, H, R). A pair of None: no adapters on that projection.
        lora_ranks: (L,) int32, rank of each slot, clamped to [0, R]; what lies past it is never read into a result.
        adapter_enabled: (>= L,) int32 or bool; 0 disables a slot.
        w13_bias: (E, S * I), w2_bias: (E, H), dtype of hidden_states; w2_bias is weighted by w.
        expert_map: (global experts,) int32 or int64, global to local expert id, -1 not here; topk_ids are then global.
        activation: "silu", "gelu", "gelu_tanh", "relu2" (f(gate) * up, or f(gu) when not gated) or "swigluoai"
            ((up + 1) * gate * sigmoid(swiglu_alpha * gate)).
        swiglu_limit: clamp gate from above and up on both sides first; no effect when not gated.
        apply_router_weight_on_input: multiply x by w before the first projection and its A, and leave y_k unweighted.
        routed_scaling_factor: multiplies the sum.

    Returns: (T, H), dtype of hidden_states. Rounding: docs/numerics.md.
    Raises: ValueError, TypeError naming the argument, what was expected and what came.
    """
    args = (
        hidden_states, w13, w2, topk_weights, topk_ids, token_lora_mapping, lora_a13, lora_b13, lora_a2, lora_b2
    )  # fmt: skip
    options: dict[str, Any] = {}  # what has its default is left out: the dispatcher takes half a microsecond for each
    if lora_ranks is not None:
        options["lora_ranks"] = lora_ranks
    if adapter_enabled is not None:
        options["adapter_enabled"] = adapter_enabled
    if w13_bias is not None:
        options["w13_bias"] = w13_bias
    if w2_bias is not None:
        options["w2_bias"] = w2_bias
    if expert_map is not None:
        options["expert_map"] = expert_map
    if activation != "silu":
        options["activation"] = activation
    if gated is not True:
        options["gated"] = gated
    if interleaved is not False:
        options["interleaved"] = interleaved
    if type(swiglu_alpha) is not float or swiglu_alpha != 1.702:
        options["swiglu_alpha"] = swiglu_alpha
    if swiglu_limit is not None:
        options["swiglu_limit"] = swiglu_limit
    if apply_router_weight_on_input is not False:
        options["apply_router_weight_on_input"] = apply_router_weight_on_input
    if type(routed_scaling_factor) is not float or routed_scaling_factor != 1.0:
        options["routed_scaling_factor"] = routed_scaling_factor
    result: Tensor
    if _library.autograd_has_work(args, options):
        result = _OP(*args, **options)
    else:
        with _library.below_autograd():
            result = _OP(*args, **options)
    return result
