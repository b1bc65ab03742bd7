"""Last stage of the layer op: the sum over a token's choices."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

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
    scale,
    num_experts,
    num_global_experts,
    hidden_size,
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
        width = tl.where((expert >= 0) & (expert < num_experts), hidden_size, 0)
        acc += tl.load(rows_ptr + pair * hidden_size + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden_size + columns, (scale * acc).to(out_ptr.dtype.element_ty), mask=columns < hidden_size)


def combine(
    rows: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    out: Tensor,
    *,
    num_experts: int,
    scale: float,
    block_n: int,
    pdl: dict[str, Any],
) -> None:
    """Fill out [T, H] from rows [P, H]; topk_ids [T, K] contiguous, expert_map as in the op."""
    num_tokens, hidden_size = out.shape
    combine_kernel[(num_tokens, triton.cdiv(hidden_size, block_n))](
        rows, topk_ids, expert_map, out, scale,
        num_experts, 0 if expert_map is None else expert_map.shape[0], hidden_size,
        TOP_K=topk_ids.shape[1], BLOCK_N=block_n, num_warps=4, USE_PDL=bool(pdl), **pdl,
    )  # fmt: skip
