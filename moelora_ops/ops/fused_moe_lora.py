"""The delta op: add the adapters' delta to the output of anybody's base GEMM."""

from __future__ import annotations

from typing import Any, Sequence

from torch import Tensor

from .. import reference
from ..kernels import native
from ..meta import fused_moe_lora as contract
from . import _library

_NATIVE = native.op(contract.NAME, "cpu")


def _cpu(*args: Any, **kwargs: Any) -> None:
    contract.check(*args, **kwargs)
    reference.fused_moe_lora(*args, **kwargs)


def _cuda(*args: Any, **kwargs: Any) -> None:
    contract.check(*args, **kwargs)
    from ..kernels.triton import delta

    delta.fused_moe_lora(*args, **kwargs)


_OP = _library.register(contract.SCHEMA, check=contract.check, fake=contract.fake, cpu=_cpu, cuda=_cuda)
_library.refuse_backward(_OP, check=contract.check, cpu=_NATIVE or _cpu, cuda=_cuda)


def fused_moe_lora(
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
    """Add each pair's adapter delta to `output`, in place.

        output[t, k, offset + s * N : offset + (s + 1) * N] += [w] * B_s[l, e] (A_s[l, e] x)

    The row order is the pair order (t, k), not the sorted order. Rows of pairs without an adapter are not touched.

    Args:
        output: (T, K, >= offset + S * N), fp32, bf16 or fp16, written; rows must not overlap.
        hidden_states: (T, in), or (P, in) with one row per pair, dtype of output.
        lora_a_stacked: S tensors (L, E or 1, R, in), dtype of output; an expert dimension of 1 is shared by all experts;
            leading dimensions may be views, slices or expanded.
        lora_b_stacked: S tensors (L, E or 1, N, R); the scaling alpha / r is already folded into B.
        topk_weights: (T, K) fp32, used when `mul_routed_weight`.
        sorted_token_ids, expert_ids, num_tokens_post_padded: from `moe_lora_align_block_size`, (L, EM), (L, blocks), (L,)
            int32; the block size is EM / blocks. Pair ids outside [0, P) are padding, experts outside [0, E) have no delta. A
            pair listed twice (the alignment lists it once) is written by two threads at a time: its row is undefined.
        lora_ranks: (L,) int32, rank of each slot's adapter, clamped to [0, R]; columns past it are not read into a result.
        mul_routed_weight: multiply the delta by the pair's weight, in fp32.
        offset: first column written.

    Raises: ValueError, TypeError naming the argument, what was expected and what came, before anything is written.
    Rounding: products accumulate in fp32; output + delta is rounded once (docs/numerics.md).
    Source: shrink and expand of SGMV, Punica, arXiv:2310.18547; the contract of SGLang's and vLLM's fused_moe_lora.
    """
    args = (
        output, hidden_states, lora_a_stacked, lora_b_stacked, topk_weights,
        sorted_token_ids, expert_ids, num_tokens_post_padded,
    )  # fmt: skip
    options = {"lora_ranks": lora_ranks, "mul_routed_weight": mul_routed_weight, "offset": offset}
    if _library.autograd_has_work(args, options):
        _OP(*args, **options)
    else:
        with _library.below_autograd():
            _OP(*args, **options)
        _library.increment_version(output)
