"""The delta op: one or two launches add the adapters' delta to the output of anybody's base GEMM."""

from __future__ import annotations

from typing import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import config
from ._common import gdc_launch, gdc_wait, on_device, pdl_options
from ._delta import column_tile, floor_to, load_b, load_tile, load_z, locate_rows, shrink_tile

_VARYING = [
    "num_pairs", "max_loras", "num_experts", "block_size", "blocks_per_slot", "units_per_block", "capacity", "max_rank",
    "in_features", "out_features", "offset", "stride_xm", "stride_a0l", "stride_a0e", "stride_a0r", "stride_a1l", "stride_a1e",
    "stride_a1r", "stride_b0l", "stride_b0e", "stride_b0n", "stride_b1l", "stride_b1e", "stride_b1n", "stride_ot", "stride_ok",
    "stride_zm", "programs",
]  # fmt: skip
_SMALL = ["sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr", "ranks_ptr", "topk_weights_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SMALL)
def delta_kernel(
    output_ptr,
    x_ptr,
    z_ptr,  # [SPLITS, P, NUM_SLICES * R] scratch
    a0_ptr,
    a1_ptr,  # None: one slice
    b0_ptr,
    b1_ptr,
    topk_weights_ptr,  # None: the delta is not weighted
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    units_per_block,
    capacity,
    max_rank,
    in_features,
    out_features,
    offset,
    stride_xm,
    stride_a0l,
    stride_a0e,
    stride_a0r,
    stride_a1l,
    stride_a1e,
    stride_a1r,
    stride_b0l,
    stride_b0e,
    stride_b0n,
    stride_b1l,
    stride_b1e,
    stride_b1n,
    stride_ot,
    stride_ok,
    stride_zm,
    programs,  # of one unit of rows, neighbours: rank tiles and splits of K, or tiles of columns; 1 if both
    SHRINK: tl.constexpr,  # this launch computes z
    EXPAND: tl.constexpr,  # this launch adds z . B
    TOP_K: tl.constexpr,
    ROWS_PER_INPUT: tl.constexpr,  # top_k: x has one row per token; 1: one per pair
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    MORE_RANKS: tl.constexpr,  # than BLOCK_RN
    UNIT_K: tl.constexpr,
    UNIT_R: tl.constexpr,
    UNIT_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,  # ranks of a shrink tile
    BLOCK_RN: tl.constexpr,  # ranks of an expand tile
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, pair, s * R + j] = x[pair] . A_s[slot, expert, j] over one split of K, and
    output[t, k, offset + s * N + n] += [w] * z[pair, s * R :] . B_s[slot, expert, n], added in fp32, rounded once.

    Grid: `programs` programs per unit of rows. Units are bounded by pairs: programs find their rows on the device, and stride
    on where a table has more blocks than pairs can fill. Rows of pairs without an adapter are not touched.

    A launch that only expands follows the one that shrinks. That one waited before it let this one start, so all that is older
    (ids, B, output) is complete and may be read before the wait; only z may not.
    """
    NUM_SLICES: tl.constexpr = 1 if a1_ptr is None else 2
    if SHRINK:
        gdc_wait(USE_PDL)
        gdc_launch(USE_PDL)
    inner = tl.program_id(0) % programs
    unit = tl.program_id(0) // programs
    z_rank = floor_to(max_rank, UNIT_R)
    z_stride = floor_to(stride_zm, UNIT_R)
    num_units = unit + 1
    while unit < num_units:
        slot, expert, rank, ids_ptr, num_rows, num_units = locate_rows(
            unit, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr, ranks_ptr,
            num_pairs, max_loras, num_experts, block_size, blocks_per_slot, units_per_block, capacity, max_rank,
            ROWS, SPAN, CHUNK,
        )  # fmt: skip
        slot = slot.to(tl.int64)
        expert = expert.to(tl.int64)
        for first in range(0, num_rows, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            pairs = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1)
            valid = (pairs >= 0) & (pairs < num_pairs)
            z_offsets = pairs.to(tl.int64) * z_stride
            if EXPAND:
                num_tiles = NUM_SLICES * tl.cdiv(out_features, BLOCK_N)
                out_rows = output_ptr + floor_to(offset, UNIT_N)
                out_rows += (pairs // TOP_K).to(tl.int64) * floor_to(stride_ot, UNIT_N)
                out_rows += (pairs % TOP_K).to(tl.int64) * floor_to(stride_ok, UNIT_N)
                b0 = b0_ptr + slot * floor_to(stride_b0l, UNIT_R) + expert * floor_to(stride_b0e, UNIT_R)
                b1 = b0
                if b1_ptr is not None:
                    b1 = b1_ptr + slot * floor_to(stride_b1l, UNIT_R) + expert * floor_to(stride_b1e, UNIT_R)
                ranks = tl.arange(0, BLOCK_RN)
                if not SHRINK:
                    next_b, next_base = load_tile(
                        inner, num_tiles, out_rows, valid, out_features, b0, stride_b0n, b1, stride_b1n, ranks, rank,
                        NUM_SLICES, UNIT_N, UNIT_R, BLOCK_N,
                    )  # fmt: skip
                if topk_weights_ptr is not None:
                    weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
            if SHRINK:
                split = inner % SPLITS
                k_steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS)
                k_begin = split * k_steps * BLOCK_K
                a0 = a0_ptr + slot * floor_to(stride_a0l, UNIT_K) + expert * floor_to(stride_a0e, UNIT_K)
                a1 = a0
                if a1_ptr is not None:
                    a1 = a1_ptr + slot * floor_to(stride_a1l, UNIT_K) + expert * floor_to(stride_a1e, UNIT_K)
                x_offsets = (pairs // ROWS_PER_INPUT).to(tl.int64) * floor_to(stride_xm, UNIT_K)
                for begin in range(inner // SPLITS * BLOCK_R, rank, programs // SPLITS * BLOCK_R):
                    shrunk = shrink_tile(
                        x_ptr, x_offsets, valid, a0, stride_a0r, a1, stride_a1r, begin, rank,
                        k_begin, tl.minimum(k_begin + k_steps * BLOCK_K, in_features),
                        NUM_SLICES, EVEN_K, UNIT_K, BLOCK_M, BLOCK_R, BLOCK_K,
                    )  # fmt: skip
                    z_columns = tl.arange(0, NUM_SLICES * BLOCK_R)
                    z_ranks = begin + z_columns % BLOCK_R
                    z_ptrs = z_ptr + split.to(tl.int64) * num_pairs * z_stride + z_offsets[:, None]
                    z_ptrs += (z_columns // BLOCK_R * z_rank + z_ranks)[None, :]
                    z_mask = valid[:, None] & (floor_to(z_ranks, UNIT_R) < rank)[None, :]
                    tl.store(z_ptrs, shrunk.to(z_ptr.dtype.element_ty), mask=z_mask)
            if EXPAND and SHRINK:
                tl.debug_barrier()  # z was written by other threads of this program
                next_b, next_base = load_tile(
                    inner, num_tiles, out_rows, valid, out_features, b0, stride_b0n, b1, stride_b1n, ranks, rank,
                    NUM_SLICES, UNIT_N, UNIT_R, BLOCK_N,
                )  # fmt: skip
            elif EXPAND:
                gdc_wait(USE_PDL)
                gdc_launch(USE_PDL)
            if EXPAND:
                split_stride = tl.cast(num_pairs, tl.int64) * z_stride
                for tile in tl.range(inner, num_tiles, programs, num_stages=1):
                    b, base = next_b, next_base  # on their way since the tile before: the only pipeline that needs no copies
                    next_b, next_base = load_tile(
                        tile + programs, num_tiles, out_rows, valid, out_features, b0, stride_b0n, b1, stride_b1n, ranks, rank,
                        NUM_SLICES, UNIT_N, UNIT_R, BLOCK_N,
                    )  # fmt: skip
                    part, columns, num_columns, out_ptrs, out_mask = column_tile(
                        tile, num_tiles, out_rows, valid, out_features, NUM_SLICES, UNIT_N, BLOCK_N
                    )
                    z = load_z(z_ptr + part * z_rank, z_offsets, split_stride, valid, ranks, rank, UNIT_R, SPLITS)
                    delta = tl.dot(z.to(b.dtype), tl.where(ranks[:, None] < rank, b, 0.0), input_precision="ieee")
                    if MORE_RANKS:
                        for begin in tl.range(BLOCK_RN, rank, BLOCK_RN, num_stages=1):
                            more = begin + ranks
                            b = load_b(
                                part, columns, num_columns, b0, stride_b0n, b1, stride_b1n, more, rank, NUM_SLICES, UNIT_R
                            )
                            z = load_z(z_ptr + part * z_rank, z_offsets, split_stride, valid, more, rank, UNIT_R, SPLITS)
                            b = tl.where(more[:, None] < rank, b, 0.0)
                            delta = tl.dot(z.to(b.dtype), b, delta, input_precision="ieee")
                    if topk_weights_ptr is not None:
                        delta *= weight[:, None]
                    result = base.to(tl.float32) + delta
                    tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=out_mask)
        unit += tl.num_programs(0) // programs
    if not SHRINK:
        gdc_wait(USE_PDL)  # no program ends before the launch in front has: the one behind waits for this one alone


def new_z(like: Tensor, splits: int, num_pairs: int, width: int) -> Tensor:
    """Uninitialised z [splits, P, S * R]: fp32 for partial sums, the dtype of `like` where the sum is whole."""
    dtype = torch.float32 if splits > 1 else like.dtype
    return torch.empty((splits, num_pairs, width), dtype=dtype, device=like.device)


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
    tiles: config.Delta | None = None,
) -> None:
    """The delta op on checked arguments: see `moelora_ops.fused_moe_lora`. `tiles`: instead of the configured ones.

    Slices are served two at a time. Scratch: z [splits, P, 2 R], not filled first.
    """
    num_tokens, top_k, _ = output.shape
    num_pairs = num_tokens * top_k
    max_loras, capacity = sorted_token_ids.shape
    blocks_per_slot = expert_ids.shape[1]
    max_rank, in_features = lora_a_stacked[0].shape[2:]
    out_features = lora_b_stacked[0].shape[2]
    if 0 in (num_pairs, max_loras, capacity, max_rank, out_features):
        return
    block_size = capacity // blocks_per_slot
    num_experts = max(t.shape[1] for t in (*lora_a_stacked, *lora_b_stacked))
    slices = min(len(lora_a_stacked), 2)
    problem = config.Problem(num_pairs, num_experts, in_features, out_features, slices, output.dtype)
    tiles = tiles or config.delta(problem, block_size, config.describe(output.device))
    # A unit of rows is a part of a large block, or a run of small ones.
    span = 1
    while 2 * span * block_size <= tiles.rows:
        span *= 2
    units_per_block = triton.cdiv(block_size, tiles.rows)
    # Blocks hold at least one pair, and but for the last of each (expert, adapter) they are full.
    groups = max_loras * max(blocks_per_slot - num_pairs // block_size, 1)
    num_units = units_per_block * min(num_pairs, max_loras * blocks_per_slot, num_pairs // block_size + groups)
    table = (sorted_token_ids.contiguous(), expert_ids.contiguous(), num_tokens_post_padded.contiguous())
    ranks = None if lora_ranks is None else lora_ranks.contiguous()
    weights = topk_weights.contiguous() if mul_routed_weight else None
    sizes = (
        num_pairs, max_loras, 2**31 if num_experts == 1 else num_experts,  # one expert everywhere serves any id
        block_size, blocks_per_slot, units_per_block, capacity, max_rank, in_features, out_features,
    )  # fmt: skip
    shrink, splits = tiles.shrink, tiles.shrink.splits
    block_r = config.block_r(max_rank)
    constants = {
        "TOP_K": top_k, "ROWS_PER_INPUT": top_k if hidden_states.shape[0] == num_tokens else 1, "SPLITS": splits,
        "EVEN_K": in_features % shrink.block_k == 0,
        "MORE_RANKS": max_rank > MAX_EXPAND_R, "BLOCK_M": tiles.block_m, "BLOCK_K": shrink.block_k, "BLOCK_R": block_r,
        "BLOCK_RN": min(max(triton.next_power_of_2(max_rank), 16), MAX_EXPAND_R), "BLOCK_N": tiles.block_n,
        "ROWS": tiles.rows, "SPAN": span, "CHUNK": min(triton.next_power_of_2(max_loras), 128),
    }  # fmt: skip
    with on_device(output.device):
        pdl = pdl_options(output.device)
        constants |= {"USE_PDL": bool(pdl), **pdl}
        for begin in range(0, len(lora_a_stacked), 2):
            a, b = lora_a_stacked[begin : begin + 2], lora_b_stacked[begin : begin + 2]
            z = new_z(output, splits, num_pairs, len(a) * max_rank)
            first = offset + begin * out_features
            two = len(a) == 2
            a_strides, b_strides = (*_strides(a[0]), *_strides(a[-1])), (*_strides(b[0]), *_strides(b[-1]))
            args = (
                output, hidden_states, z, a[0], a[1] if two else None, b[0], b[1] if two else None, weights, *table, ranks,
                *sizes, first, hidden_states.stride(0), *a_strides, *b_strides, output.stride(0), output.stride(1), z.stride(1),
            )  # fmt: skip
            constants |= {
                "UNIT_K": _unit(in_features, hidden_states.stride(0), *a_strides),
                "UNIT_R": _unit(max_rank, *b_strides),
                "UNIT_N": _unit(out_features, first, output.stride(0), output.stride(1)),
            }
            stages = [(True, True, 1, tiles.num_warps)] if tiles.fused else [
                (True, False, triton.cdiv(max_rank, block_r) * splits, shrink.num_warps),
                (False, True, triton.cdiv(len(a) * triton.cdiv(out_features, tiles.block_n), tiles.columns), tiles.num_warps),
            ]  # fmt: skip
            for does_shrink, does_expand, programs, num_warps in stages:
                grid = min(num_units, (2**31 - 1) // programs) * programs
                delta_kernel[(grid,)](
                    *args, programs, SHRINK=does_shrink, EXPAND=does_expand,
                    num_warps=num_warps, num_stages=shrink.num_stages, **constants,
                )  # fmt: skip


MAX_EXPAND_R = 64
WIDE = 8  # elements of 16 bits in one access of 16 bytes


def _unit(*sizes: int) -> int:
    """How many elements may be accessed at once where rows begin and end at these multiples."""
    return 1 if any(size % WIDE for size in sizes) else WIDE


def _strides(stacked: Tensor) -> tuple[int, int, int]:
    """Strides of (slot, expert, row); an expert dimension of 1 serves all experts."""
    return stacked.stride(0), 0 if stacked.shape[1] == 1 else stacked.stride(1), stacked.stride(2)
