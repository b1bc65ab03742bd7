"""What the two base GEMMs of the layer op share: which block a program has, and where its rows are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(num_blocks, num_tiles, GROUP_M: tl.constexpr):
    """(block of rows, tile of columns) of this program: GROUP_M blocks side by side share each tile of weights in L2."""
    pid = tl.program_id(0)
    per_group = GROUP_M * num_tiles
    first = pid // per_group * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit
def load_block(tables_ptr, block, expert_blocks_at, num_experts):
    """(expert, first row, one past the last) of an expert block; expert -1 where there is no such block."""
    there = block < tl.load(tables_ptr + 1)
    block_ptr = tables_ptr + expert_blocks_at + block.to(tl.int64) * 3
    expert = tl.load(block_ptr, mask=there, other=-1)
    first = tl.load(block_ptr + 1, mask=there, other=0)
    last = tl.load(block_ptr + 2, mask=there, other=0)
    return tl.where(expert < num_experts, expert, -1), first, last
