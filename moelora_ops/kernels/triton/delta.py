"""Launcher of the delta op: two launches, shrink and expand, add the adapters' delta to the output of anybody's base GEMM.

As in `experts`, whatever sizes, strides, types and flags decide is a `Plan`, made once and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
import triton
from torch import Tensor

from .. import config
from ._common import has_pdl, on_device
from ._delta import delta_expand_kernel, delta_shrink_kernel
from ._launch import Launch, current_stream

WIDE = 8  # elements of 16 bits in one access of 16 bytes


class Call(NamedTuple):
    """The arguments of one call, checked; what is small is contiguous."""

    output: Tensor
    hidden_states: Tensor
    lora_a: tuple[Tensor, ...]
    lora_b: tuple[Tensor, ...]
    topk_weights: Tensor | None  # None: the delta is not weighted
    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor
    lora_ranks: Tensor | None
    offset: int
    tiles: config.Delta | None  # None: the configured ones

    def key(self) -> tuple[Any, ...]:
        """Whatever a plan depends on; the values of tensors and their addresses beyond 16-byte alignment are not among it."""
        tensors = (self.output, self.hidden_states, *self.lora_a, *self.lora_b)
        views = tuple((t.shape, t.stride(), t.data_ptr() & 15) for t in tensors)
        given = (self.topk_weights is None, self.lora_ranks is None, len(self.lora_a), self.offset, self.tiles)
        return self.output.device, self.output.dtype, self.sorted_token_ids.shape, self.expert_ids.shape, views, given


class Windows(NamedTuple):
    """How kernels with tiles of some number of rows read the table: see `_delta`."""

    span: int  # blocks of a window
    parts: int  # windows of a block
    most: int  # in a table where each block holds a pair and all but the last of each (expert, adapter) are full

    @classmethod
    def of(cls, rows: int, block_size: int, num_pairs: int, max_loras: int, blocks_per_slot: int) -> Windows:
        groups = max_loras * max(blocks_per_slot - num_pairs // block_size, 1)
        blocks = min(num_pairs, max_loras * blocks_per_slot, num_pairs // block_size + groups)
        if block_size >= rows:
            parts = triton.cdiv(block_size, rows)
            return cls(1, parts, blocks * parts)
        span = 1 << ((rows // block_size).bit_length() - 1)
        return cls(span, 1, min(blocks, blocks // span + max_loras))


class Plan:
    """The launches of every call with the same `Call.key`: a shrink and an expand for each two slices."""

    def __init__(self, call: Call, device: torch.device | None = None) -> None:
        """Compiles what is not compiled yet; `device` is for calls made of meta tensors, which have no memory."""
        self.device, self.dtype = device or call.output.device, call.output.dtype
        (num_tokens, self.top_k), (self.max_loras, self.capacity) = call.output.shape[:2], call.sorted_token_ids.shape
        self.num_pairs, self.blocks_per_slot = num_tokens * self.top_k, call.expert_ids.shape[1]
        self.block_size = self.capacity // self.blocks_per_slot
        self.max_rank, self.in_features = call.lora_a[0].shape[2:]
        self.out_features = call.lora_b[0].shape[2]
        self.num_experts = max(t.shape[1] for t in (*call.lora_a, *call.lora_b))
        slices = min(len(call.lora_a), 2)
        problem = config.Problem(self.num_pairs, self.num_experts, self.in_features, self.out_features, slices, self.dtype)
        self.tiles = call.tiles or config.delta(problem, config.describe(self.device))
        self.splits = self.tiles.shrink.splits
        self.rows_per_input = self.top_k if call.hidden_states.shape[0] == num_tokens else 1
        # The kernels only look at types and alignment while they are compiled: an empty buffer stands for z.
        z = new_z(call.output, self.splits, 0, 1)
        self.stages = [
            (len(a), self._shrink(call, z, a, b), self._expand(call, z, b, call.offset + begin * self.out_features))
            for begin, a, b in _pairs_of_slices(call)
        ]

    def _shrink(self, call: Call, z: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Launch:
        tiles, x = self.tiles.shrink, call.hidden_states
        a_strides, block_r = (*_strides(a[0]), *_strides(a[-1])), config.block_r(self.max_rank)
        rank_blocks = triton.cdiv(self.max_rank, block_r)
        windows, table, common = self._windows(self.tiles.shrink_m)
        return Launch(
            delta_shrink_kernel,
            (_grid(windows, rank_blocks * tiles.splits, config.MAX_SHRINK_PROGRAMS),),
            (x, z, a[0], a[1] if len(a) == 2 else None, *self._table(call), self._places(call.output, 1)),
            (*table, self.in_features, rank_blocks, x.stride(0), *a_strides, len(a) * self.max_rank),
            {
                "ROWS_PER_INPUT": self.rows_per_input, "EVEN_K": self.in_features % tiles.block_k == 0,
                "UNIT_K": _unit(self.in_features, x.stride(0), *a_strides), "UNIT_R": self._unit_r(b),
                "BLOCK_R": block_r, "BLOCK_K": tiles.block_k, **common,
            },
            device=self.device, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _expand(self, call: Call, z: Tensor, b: tuple[Tensor, ...], offset: int) -> Launch:
        tiles, out, two = self.tiles, call.output, len(b) == 2
        columns = tiles.expand_n * tiles.expand_tiles
        windows, table, common = self._windows(tiles.expand_m)
        return Launch(
            delta_expand_kernel,
            (_grid(windows, len(b) * triton.cdiv(self.out_features, columns), config.MAX_EXPAND_PROGRAMS),),
            (out, z, b[0], b[1] if two else None, call.topk_weights, *self._table(call)),
            (
                *table, self.out_features, offset, out.stride(0), out.stride(1), len(b) * self.max_rank,
                *_strides(b[0]), *_strides(b[-1]),
            ),
            {
                "TOP_K": self.top_k, "MORE_RANKS": self.max_rank > config.MAX_EXPAND_R, "UNIT_R": self._unit_r(b),
                "UNIT_N": _unit(self.out_features, offset, out.stride(0), out.stride(1)),
                "BLOCK_N": tiles.expand_n, "COLUMNS": columns, "STAGES": tiles.expand_stages,
                "BLOCK_R": min(max(triton.next_power_of_2(self.max_rank), 16), config.MAX_EXPAND_R), **common,
            },
            device=self.device, num_warps=tiles.expand_warps, num_stages=2,
        )  # fmt: skip

    def _windows(self, rows: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
        """Number of windows, and what both kernels take to find them: scalars, constants."""
        windows = Windows.of(rows, self.block_size, self.num_pairs, self.max_loras, self.blocks_per_slot)
        experts = 2**31 if self.num_experts == 1 else self.num_experts  # one expert everywhere serves any id
        scalars = (
            self.num_pairs, self.max_loras, experts, self.block_size, self.blocks_per_slot, windows.parts, self.capacity,
            self.max_rank,
        )  # fmt: skip
        constants = {
            "SPLITS": self.splits, "BLOCK_M": rows, "SPAN": windows.span, "SLOTS": triton.next_power_of_2(self.max_loras),
            "USE_PDL": has_pdl(self.device),
        }  # fmt: skip
        return windows.most, scalars, constants

    @staticmethod
    def _table(call: Call) -> tuple[Tensor | None, ...]:
        return call.sorted_token_ids, call.expert_ids, call.num_tokens_post_padded, call.lora_ranks

    @staticmethod
    def _places(like: Tensor, num_pairs: int) -> Tensor | None:
        """Memory for the shrink to tell which pairs it saw; None: nobody asks."""
        return None

    def _unit_r(self, b: tuple[Tensor, ...]) -> int:
        return _unit(self.max_rank, *_strides(b[0]), *_strides(b[-1]))

    def run(self, call: Call) -> None:
        """Launch everything on the current stream. Scratch: z [splits, P, 2 R] for each two slices, not filled first."""
        stream, table = current_stream(self.device), self._table(call)
        for (num_slices, shrink, expand), (_, a, b) in zip(self.stages, _pairs_of_slices(call)):
            z = new_z(call.output, self.splits, self.num_pairs, num_slices * self.max_rank)
            a1, b1 = (a[1], b[1]) if num_slices == 2 else (None, None)
            shrink(stream, call.hidden_states, z, a[0], a1, *table, None)
            expand(stream, call.output, z, b[0], b1, call.topk_weights, *table)


def new_z(like: Tensor, splits: int, num_pairs: int, width: int) -> Tensor:
    """Uninitialised z [splits, P, S * R]: fp32 for partial sums, the dtype of `like` where the sum is whole."""
    return like.new_empty((splits, num_pairs, width), dtype=torch.float32 if splits > 1 else like.dtype)


_PLANS: dict[Any, Plan] = {}  # compiled launches; a plan never changes, so threads may race to make one
_MAX_PLANS = 4096


def plan(call: Call) -> Plan:
    """The plan of a call, made on first use."""
    key = call.key()
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) >= _MAX_PLANS:  # a size of batch and a set of strides each: never in serving
            _PLANS.clear()
        found = _PLANS[key] = Plan(call)
    return found


def fused_moe_lora(output: Tensor, *args: Any, **kwargs: Any) -> None:
    """The delta op on checked arguments: see `moelora_ops.fused_moe_lora`."""
    call = prepare(output, *args, **kwargs)
    if 0 in (*output.shape[:2], *call.sorted_token_ids.shape, *call.lora_b[0].shape[2:]):
        return
    with on_device(output.device):
        plan(call).run(call)


def prepare(
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
) -> Call:
    """The op's arguments as its kernels take them. `tiles`: instead of the configured ones."""
    return Call(
        output, hidden_states, tuple(lora_a_stacked), tuple(lora_b_stacked),
        topk_weights.contiguous() if mul_routed_weight else None, sorted_token_ids.contiguous(), expert_ids.contiguous(),
        num_tokens_post_padded.contiguous(), None if lora_ranks is None else lora_ranks.contiguous(), offset, tiles,
    )  # fmt: skip


def _pairs_of_slices(call: Call) -> list[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """(first slice, its A and B with those of the next): x and its rows are read once for two."""
    return [(n, call.lora_a[n : n + 2], call.lora_b[n : n + 2]) for n in range(0, len(call.lora_a), 2)]


def _grid(windows: int, programs: int, most: int) -> int:
    """Whole windows of `programs` programs each, about `most` programs at most."""
    return min(windows, max(most // programs, 1)) * programs


def _unit(*sizes: int) -> int:
    """How many elements may be accessed at once where rows begin and end at these multiples."""
    return 1 if any(size % WIDE for size in sizes) else WIDE


def _strides(stacked: Tensor) -> tuple[int, int, int]:
    """Strides of (slot, expert, row); an expert dimension of 1 serves all experts."""
    return stacked.stride(0), 0 if stacked.shape[1] == 1 else stacked.stride(1), stacked.stride(2)
