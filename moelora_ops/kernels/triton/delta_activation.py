"""Launcher of the delta op with the activation behind it: two launches, shrink and expand, as in `delta`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .. import config
from . import delta
from ._common import on_device
from ._delta_activation import expand_activation_kernel
from ._launch import Launch, current_stream

_ROWS = 16  # of 64 rows the dots would be WGMMAs, fed from registers by splits
# Up to so many pairs: columns of a tile, tiles that one program walks, warps, stages. H200: docs/measurements/passes.md.
_WALKS = ((16, (32, 1, 2, 1)), (128, (64, 1, 2, 1)), (512, (32, 8, 2, 4)))
_WALK, _WALK_FP32 = (64, 16, 4, 3), (32, 2, 4, 2)


class Plan(delta.Plan):
    """The launches of every call with the same `Call.key` and activation; one or two slices, the whole width of the base."""

    def __init__(self, call: delta.Call, activation: str, device: torch.device | None = None) -> None:
        self.activation = activation
        super().__init__(call, device)

    @staticmethod
    def _places(like: Tensor, num_pairs: int) -> Tensor:
        return like.new_empty(num_pairs, dtype=torch.int64)

    def _walk(self) -> tuple[int, int, int, int]:
        if self.dtype == torch.float32:
            return _WALK_FP32
        return next((walk for most, walk in _WALKS if self.num_pairs <= most), _WALK)

    def _expand(self, call: delta.Call, z: Tensor, b: tuple[Tensor, ...], offset: int) -> Launch:
        base = call.output
        block_n, tiles, num_warps, num_stages = self._walk()
        columns = block_n * tiles
        groups = triton.cdiv(self.out_features, columns)
        windows, table, common = self._windows(_ROWS)
        window_programs = delta._grid(windows, groups, config.MAX_EXPAND_PROGRAMS)
        rest = delta._grid(triton.cdiv(self.num_pairs, _ROWS), groups, config.MAX_SHRINK_PROGRAMS)
        return Launch(
            expand_activation_kernel,
            (window_programs + rest,),
            (
                base.new_empty(1), base, z, b[0], b[1] if len(b) == 2 else None, call.topk_weights, *self._table(call),
                self._places(base, 1),
            ),
            (
                *table, window_programs, self.out_features, base.stride(0), base.stride(1), len(b) * self.max_rank,
                *delta._strides(b[0]), *delta._strides(b[-1]),
            ),
            {
                "ACTIVATION": self.activation, "TOP_K": self.top_k, "MORE_RANKS": self.max_rank > config.MAX_EXPAND_R,
                "UNIT_R": self._unit_r(b), "UNIT_N": delta._unit(self.out_features, base.stride(0), base.stride(1)),
                "BLOCK_N": block_n, "COLUMNS": columns, "STAGES": num_stages,
                "BLOCK_R": min(max(triton.next_power_of_2(self.max_rank), 16), config.MAX_EXPAND_R), **common,
            },
            device=self.device, num_warps=num_warps, num_stages=2,
        )  # fmt: skip

    def activated(self, call: delta.Call) -> Tensor:
        """Launch both on the current stream. Scratch: z as in `delta`, 8 bytes for each pair."""
        ((num_slices, shrink, expand),) = self.stages
        stream, table = current_stream(self.device), self._table(call)
        out = call.output.new_empty(*call.output.shape[:2], self.out_features)
        z = delta.new_z(call.output, self.splits, self.num_pairs, num_slices * self.max_rank)
        places = self._places(call.output, self.num_pairs)
        (a0, *a1), (b0, *b1) = call.lora_a, call.lora_b
        shrink(stream, call.hidden_states, z, a0, a1[0] if a1 else None, *table, places)
        expand(stream, out, call.output, z, b0, b1[0] if b1 else None, call.topk_weights, *table, places)
        return out


_PLANS: dict[Any, Plan] = {}  # as in `delta`


def fused_moe_lora_activation(
    base_output: Tensor, *args: Any, mul_routed_weight: bool = False, activation: str = "silu", **kwargs: Any
) -> Tensor:
    """The op on checked arguments: see `moelora_ops.ops.fused_moe_lora_activation`."""
    call = delta.prepare(base_output, *args, mul_routed_weight=mul_routed_weight, **kwargs)
    if 0 in base_output.shape:
        return base_output.new_empty(*base_output.shape[:2], call.lora_b[0].shape[2])
    if 0 in (*call.sorted_token_ids.shape, call.lora_b[0].shape[3]):
        from ...reference import activate

        gated = len(call.lora_b) == 2
        return activate(base_output.float(), activation, gated=gated, interleaved=False, alpha=0.0, limit=None).to(
            base_output.dtype
        )
    key = call.key(), activation
    with on_device(base_output.device):
        found = _PLANS.get(key)
        if found is None:
            if len(_PLANS) >= delta._MAX_PLANS:
                _PLANS.clear()
            found = _PLANS[key] = Plan(call, activation)
        return found.activated(call)
