"""Last stage of the layer op: the sum over a token's choices."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_wait


@triton.jit(
    do_not_specialize=["num_experts", "num_global_experts"],
    do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"],
)
def combine_kernel(
    rows_ptr,
    topk_ids_ptr,
    expert_map_ptr,  # None: topk_ids are local
    out_ptr,
    num_experts,
    num_global_experts,
    hidden_size,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[t] = scale * sum_k rows[t, k], in fp32 and in order of k, rounded once.

    Grid: one program per (token, BLOCK_N columns). Rows of pairs without an expert were never written and are not read.
    """
    gdc_wait(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(topk_ids_ptr + pair)
        if expert_map_ptr is not None:
            known = (expert >= 0) & (expert < num_global_experts)
            expert = tl.load(expert_map_ptr + expert, mask=known, other=-1)
        here = (expert >= 0) & (expert < num_experts)
        width = hidden_size * here.to(tl.int32)  # a product, not a select: it stays a known multiple of 16, for vector loads
        acc += tl.load(rows_ptr + pair * hidden_size + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden_size + columns, (scale * acc).to(out_ptr.dtype.element_ty), mask=columns < hidden_size)
