"""The counting sort under align and route: stable, deterministic, linear in pairs and keys, two launches.

Pairs are cut into chunks of consecutive pairs, one program each.

    count   keys[p] of each pair, counts[chunk, key]
    place   a pair's position in its group = pairs of that key in earlier chunks (a column sum of counts)
                                           + pairs of that key before it in its chunk (a cursor per key)

Chunks share nothing but `counts`, which is complete before the second launch: no atomics between programs, so no result can
depend on their order. There are at most 4 P / keys chunks, so the tables stay O(P + keys) whatever the number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routing import round_up

NUM_WARPS = 16  # the comparison below is 32 elements a thread: 107 registers, no spills on sm_90
BLOCK_PAIRS = 128  # pairs ranked at once, by a BLOCK_PAIRS^2 comparison in registers
BLOCK_KEYS = 512
BLOCK_CHUNKS = 8
BLOCK_FILL = 4096
MAX_CHUNKS = 64  # each place program reads all counts: 64 chunks of 1024 keys are 256 KB of L2 reads


@dataclass(frozen=True)
class Chunks:
    """How the pairs are cut: `count` chunks of `pairs` pairs, and the row stride of tables with a column per key."""

    count: int
    pairs: int
    stride: int

    @staticmethod
    def of(num_pairs: int, num_keys: int) -> Chunks:
        wanted = max(1, min(MAX_CHUNKS, triton.cdiv(num_pairs, BLOCK_PAIRS), 4 * num_pairs // num_keys))
        pairs = round_up(triton.cdiv(num_pairs, wanted), BLOCK_PAIRS)
        # One column more than keys, for the end of the last group; a multiple of 16 keeps Triton's specialisation constant.
        return Chunks(triton.cdiv(num_pairs, pairs), pairs, round_up(num_keys + 1, 16))

    def table(self, like: Tensor, columns: int = 1) -> Tensor:
        """Uninitialised int32 [count, columns * stride]: private rows of each chunk."""
        return like.new_empty((self.count, columns * self.stride), dtype=torch.int32)


@dataclass(frozen=True)
class Ids:
    """The id tensors as kernels read them: contiguous, flags as bytes or int32."""

    topk_ids: Tensor
    token_lora_mapping: Tensor
    adapter_enabled: Tensor | None
    expert_map: Tensor | None

    @staticmethod
    def of(topk_ids: Tensor, token_lora_mapping: Tensor, adapter_enabled: Tensor | None, expert_map: Tensor | None) -> Ids:
        if adapter_enabled is not None:
            adapter_enabled = adapter_enabled.contiguous()
            if adapter_enabled.dtype == torch.bool:
                adapter_enabled = adapter_enabled.view(torch.uint8)
        return Ids(
            topk_ids.contiguous(),
            token_lora_mapping.contiguous(),
            adapter_enabled,
            None if expert_map is None else expert_map.contiguous(),
        )


@triton.jit
def pair_slots(p, inside, mapping_ptr, enabled_ptr, top_k, max_loras):
    """Adapter slot of each pair; -1 for none, out of range or disabled."""
    slot = tl.load(mapping_ptr + p.to(tl.int32) // top_k, mask=inside, other=-1)
    known = (slot >= 0) & (slot < max_loras)
    if enabled_ptr is not None:
        known = known & (tl.load(enabled_ptr + slot, mask=known, other=0) != 0)
    return tl.where(known, slot, -1).to(tl.int32)


@triton.jit
def pair_experts(p, inside, topk_ids_ptr, expert_map_ptr, num_experts, num_global_experts):
    """Local expert of each pair; -1 for out of range or not here."""
    expert = tl.load(topk_ids_ptr + p, mask=inside, other=-1)
    if expert_map_ptr is not None:
        known = (expert >= 0) & (expert < num_global_experts)
        expert = tl.load(expert_map_ptr + expert, mask=known, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)


@triton.jit
def chunk_bounds(chunk, chunk_pairs, num_pairs):
    """First pair of a chunk and one past its last; 64-bit, since the end of a block may pass 2^31."""
    first = chunk.to(tl.int64) * chunk_pairs
    return first, tl.minimum(first + chunk_pairs, num_pairs.to(tl.int64))


@triton.jit
def zero_row(row_ptr, num_keys, BLOCK_KEYS: tl.constexpr):
    """Clear a row that only this program counts in."""
    for start in range(0, num_keys, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        tl.store(row_ptr + key, tl.zeros((BLOCK_KEYS,), tl.int32), mask=key < num_keys)
    tl.debug_barrier()


@triton.jit
def column_sums(counts_ptr, key, inside, chunk, num_chunks, stride, BLOCK_CHUNKS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Pairs of each key in the chunks before this one, and in all chunks."""
    before = tl.zeros((BLOCK_CHUNKS, BLOCK_KEYS), tl.int32)
    total = tl.zeros((BLOCK_CHUNKS, BLOCK_KEYS), tl.int32)
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        row = start + tl.arange(0, BLOCK_CHUNKS)
        at = row.to(tl.int64)[:, None] * stride + key[None, :]
        n = tl.load(counts_ptr + at, mask=(row < num_chunks)[:, None] & inside[None, :], other=0)
        total += n
        before += tl.where((row < chunk)[:, None], n, 0)
    return tl.sum(before, axis=0), tl.sum(total, axis=0)


@triton.jit
def take_positions(cursor_ptr, key, BLOCK_PAIRS: tl.constexpr):
    """Position of each pair in its group, in pair order, and advance the cursors; key -1 is no pair.

    The barriers order all reads of a cursor before its one write (by the last pair of the key in this block), and that before
    the next block's reads.
    """
    i = tl.arange(0, BLOCK_PAIRS)
    # Pairs of the same key before (low half) and after (high half), in one reduction.
    step = tl.where(i[None, :] < i[:, None], 1, tl.where(i[None, :] > i[:, None], 65536, 0))
    around = tl.sum(tl.where(key[None, :] == key[:, None], step, 0), axis=1)
    position = tl.load(cursor_ptr + key, mask=key >= 0, other=0) + (around & 65535)
    tl.debug_barrier()
    tl.store(cursor_ptr + key, position + 1, mask=(key >= 0) & (around < 65536))
    tl.debug_barrier()
    return position
