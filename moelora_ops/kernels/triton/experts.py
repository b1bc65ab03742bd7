"""Launcher of the layer op: route, shrink, gate_up, shrink, down, combine.

Everything about a call that its sizes, strides, types and flags decide is a plan, made once and kept: compiled kernels with
their grids and scalars, the layout of scratch. A call looks its plan up, allocates and hands out addresses; on a GPU one call
of C then launches everything.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import triton
from torch import Tensor

from ...routing import RoutingSizes
from .. import config, native
from ._common import on_device
from ._expand import CHUNK
from ._launch import Launch, Slot
from ._plan import BasePlan
from .call import Call, key_of, prepare
from .direct import direct_down_kernel, direct_gate_up_kernel, direct_shrink_kernel
from .down import down_again_kernel, down_kernel
from .gate_up import gate_up_again_kernel, gate_up_kernel
from .route import route
from .shrink import shrink_kernel


class Plan(BasePlan):
    """The layer over sorted pairs."""

    def _lay_out(self, call: Call) -> None:
        """Sections: tables, act [P, I] and rows [P, H] in the dtype of the inputs, z [splits, P, S * R] of each projection."""
        tiles, p = self.tiles, self.num_pairs
        self.sizes = RoutingSizes.of(p, self.num_experts, self.max_loras, self.max_rank, tiles.gate_up.block_m, tiles.segment_m)
        self.scratch.add("tables", self.sizes.size, torch.int32)
        free = self.scratch.add("act", p * self.intermediate_size, self.dtype)
        # z13 lies where z2 and rows will: its only reader, gate_up, has ended before either is written.
        if call.lora_a13 is not None:
            self._add_z("z13", tiles.shrink13, self.num_slices, free)
        end = free if call.lora_a2 is None else self._add_z("z2", tiles.shrink2, 1, free)
        self.scratch.add("rows", p * self.hidden_size, self.dtype, at=end)
        # Tiles of a GEMM that are to be done again: by a kernel of its own where a branch would cost the tiles registers.
        self.apart = tiles.gate_up.block_m >= config.MIN_WGMMA_M or self.dtype == torch.float32
        if self.apart and self.max_loras:
            widths = ((self.intermediate_size, tiles.gate_up), (self.hidden_size, tiles.down))
            columns = max(triton.cdiv(width, gemm.block_n) for width, gemm in widths)
            self.scratch.add("again", self.sizes.num_expert_blocks * columns, torch.int32)

    def _build(self, call: Call, values: dict[str, Any]) -> list[Launch]:
        names = ("hidden_states", "lora_a13", "z13")
        self.shrink13 = self._shrink(values, names, self.tiles.shrink13, self.x_stride, self.num_slices)
        self.gate_up, self.gate_up_again = self._gate_up(call, values)
        self.shrink2 = self._shrink(values, ("act", "lora_a2", "z2"), self.tiles.shrink2, self.intermediate_size, 1)
        self.down, self.down_again = self._down(call, values)
        self.combine = self._combine(call, values)
        stages = (
            self.shrink13, self.gate_up, self.gate_up_again, self.shrink2, self.down, self.down_again, self.combine
        )  # fmt: skip
        return [stage for stage in stages if stage is not None]

    def _prepare(self, call: Call, memory: dict[str, Tensor]) -> None:
        memory["tables"] = route(
            call.topk_ids, call.token_lora_mapping, num_experts=self.num_experts, max_loras=self.max_loras,
            max_rank=self.max_rank, lora_ranks=call.lora_ranks,
            adapter_enabled=call.adapter_enabled if self.max_loras else None, expert_map=call.expert_map,
            block_m=self.tiles.gate_up.block_m, segment_m=self.tiles.segment_m,
        ).tables  # fmt: skip

    def _prepare_words(self, call: Call, slots: dict[str, Slot]) -> list[int]:
        enabled = call.adapter_enabled if self.max_loras else None
        names = (
            "topk_ids", "token_lora_mapping", None if call.lora_ranks is None else "lora_ranks",
            None if enabled is None else "adapter_enabled", None if call.expert_map is None else "expert_map", "tables",
        )  # fmt: skip
        given = [None if name is None else slots[name] for name in names]
        ids = (call.topk_ids, call.token_lora_mapping, enabled, call.expert_map)
        return native.route_words(*ids, given, self.sizes, dependent=self.pdl)

    def _shrink(
        self, values: dict[str, Any], names: Sequence[str], tiles: config.Shrink, x_stride: int, num_slices: int
    ) -> Launch | None:
        x, lora_a = names[0], values[names[1]]
        if lora_a is None:
            return None
        in_features = lora_a.shape[3]
        block_r = config.block_r(self.max_rank)
        rank_blocks = triton.cdiv(self.max_rank, block_r)
        work = self.sizes.num_segment_blocks * rank_blocks * tiles.splits
        return self._stage(
            shrink_kernel,
            (min(work, config.MAX_SHRINK_PROGRAMS),),
            (*names, "tables", "lora_ranks"),
            values,
            (
                self.num_pairs, self.num_experts, self.max_loras, self.max_rank, self.sizes.segment_blocks_at, rank_blocks,
                in_features, x_stride, lora_a.stride(0), 0 if lora_a.shape[1] == 1 else lora_a.stride(1), lora_a.stride(2),
                num_slices * self.rank_width,
            ),
            {
                "ROWS_PER_INPUT": 0 if x == "act" else self.top_k, "NUM_SLICES": num_slices, "SPLITS": tiles.splits,
                "EVEN_K": in_features % (tiles.splits * tiles.block_k) == 0, "BLOCK_M": self.tiles.segment_m,
                "BLOCK_R": block_r, "BLOCK_K": tiles.block_k,
            },
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _expand(self, lora_b: Tensor | None, splits: int, num_slices: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Constants and strides that gate_up and down have for the adapters' part."""
        if lora_b is None:
            return {"SPLITS": 1, "VEC": 1, "WAIT_LATE": False}, (0, 0, 0, 0)
        vec, strides = self._b_strides(lora_b)
        return {"SPLITS": splits, "VEC": vec, "WAIT_LATE": True}, (*strides, num_slices * self.rank_width)

    def _gate_up(self, call: Call, values: dict[str, Any]) -> tuple[Launch, Launch | None]:
        tiles, w13, lora = self.tiles.gate_up, call.w13, call.lora_b13 is not None
        constants, strides = self._expand(call.lora_b13, self.tiles.shrink13.splits, self.num_slices)
        return self._gemm_stages(
            gate_up_kernel,
            gate_up_again_kernel,
            self.sizes.num_expert_blocks * triton.cdiv(self.intermediate_size, tiles.block_n),
            (
                "hidden_states", "w13", "w13_bias", "act", "topk_weights" if call.apply_router_weight_on_input else None,
                "z13" if lora else None, "lora_b13", "lora_ranks" if lora else None, "tables",
                "again" if lora and self.apart else None,
            ),
            values,
            (
                *self._sizes(), self.hidden_size, self.intermediate_size, self.x_stride,
                w13.stride(0), w13.stride(1), 0 if call.w13_bias is None else call.w13_bias.stride(0), *strides,
                call.swiglu_alpha, call.swiglu_limit,
            ),
            {
                "ACTIVATION": call.activation, "GATED": call.gated, "INTERLEAVED": call.interleaved, "TOP_K": self.top_k,
                "W_TMA": self.w13_descriptor, "MERGED": self.merged, **constants, **self._gemm(tiles, self.hidden_size),
            },
            tiles,
        )  # fmt: skip

    def _down(self, call: Call, values: dict[str, Any]) -> tuple[Launch, Launch | None]:
        tiles, w2, lora = self.tiles.down, call.w2, call.lora_b2 is not None
        constants, strides = self._expand(call.lora_b2, self.tiles.shrink2.splits, 1)
        return self._gemm_stages(
            down_kernel,
            down_again_kernel,
            self.sizes.num_expert_blocks * triton.cdiv(self.hidden_size, tiles.block_n),
            (
                "act", "w2", "w2_bias", "rows", None if call.apply_router_weight_on_input else "topk_weights",
                "z2" if lora else None, "lora_b2", "lora_ranks" if lora else None, "tables",
                "again" if lora and self.apart else None,
            ),
            values,
            (
                *self._sizes(), self.hidden_size, self.intermediate_size, w2.stride(0), w2.stride(1),
                0 if call.w2_bias is None else call.w2_bias.stride(0), *strides,
            ),
            {"W_TMA": self.w2_descriptor, **constants, **self._gemm(tiles, self.intermediate_size)},
            tiles,
        )  # fmt: skip

    def _gemm_stages(
        self, kernel: Any, again_kernel: Any, programs: int, names: Sequence[str | None], values: dict[str, Any],
        scalars: Sequence[Any], constants: dict[str, Any], tiles: config.Gemm,
    ) -> tuple[Launch, Launch | None]:  # fmt: skip
        """The kernel, and the one that does again what it left, where there is such a thing."""
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        stage, again = self._stage(kernel, (programs,), names, values, scalars, constants, **options), None
        if names[-1] is not None:
            again = self._stage(
                again_kernel, (triton.cdiv(programs, CHUNK.value),), names, values, scalars, constants, **options
            )  # fmt: skip
        return stage, again

    def _sizes(self) -> tuple[int, ...]:
        s = self.sizes
        return (
            self.num_pairs, self.num_experts, self.max_loras, self.max_rank, s.expert_blocks_at, s.tiles_at,
            s.num_expert_blocks,
        )  # fmt: skip

    def _gemm(self, tiles: config.Gemm, in_features: int) -> dict[str, Any]:
        return {
            "EVEN_K": in_features % tiles.block_k == 0, "BLOCK_M": tiles.block_m, "TAIL_M": tiles.tail_m,
            "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "GROUP_M": tiles.group_m,
            "EXPAND_STAGES": tiles.expand_stages,
        }  # fmt: skip


class DirectPlan(BasePlan):
    """shrink, gate_up, shrink, down, combine in the order of pairs: for batches of a few pairs (see `direct`).

    With `fuse_shrink2` gate_up is the second shrink as well.
    """

    def _lay_out(self, call: Call) -> None:
        """Sections as those of `Plan`, without tables; z2 of a fused shrink lies apart from z13."""
        # Tiles of columns, over each of which gate_up sums the second shrink; 0: that is a kernel of its own.
        fused = self.tiles.fuse_shrink2 and call.lora_a2 is not None
        self.sums = triton.cdiv(self.intermediate_size, self.tiles.gate_up.block_n) if fused else 0
        free = self.scratch.add("act", self.num_pairs * self.intermediate_size, self.dtype)
        if self.sums:  # gate_up writes it while it reads z13
            free = self.scratch.add("z2", self.sums * self.num_pairs * self.rank_width, torch.float32, at=free)
        if call.lora_a13 is not None:
            self._add_z("z13", self.tiles.shrink13, self.num_slices, free)
        end = free if self.sums or call.lora_a2 is None else self._add_z("z2", self.tiles.shrink2, 1, free)
        self.scratch.add("rows", self.num_pairs * self.hidden_size, self.dtype, at=end)

    def _build(self, call: Call, values: dict[str, Any]) -> list[Launch]:
        tiles, pair_stride = self.tiles, self.intermediate_size
        x, act = ("hidden_states", "lora_a13", "z13"), ("act", "lora_a2", "z2")
        self.shrink13 = self._shrink(call, values, x, tiles.shrink13, self.x_stride, self.top_k, self.num_slices)
        self.gate_up = self._gate_up(call, values)
        self.shrink2 = None if self.sums else self._shrink(call, values, act, tiles.shrink2, pair_stride, 1, 1)
        self.down = self._down(call, values)
        self.combine = self._combine(call, values)
        stages = (self.shrink13, self.gate_up, self.shrink2, self.down, self.combine)
        return [stage for stage in stages if stage is not None]

    def _shrink(
        self, call: Call, values: dict[str, Any], names: Sequence[str], tiles: config.Shrink, x_stride: int,
        rows_per_input: int, num_slices: int,
    ) -> Launch | None:  # fmt: skip
        lora_a = values[names[1]]
        if lora_a is None:
            return None
        in_features, block_r = lora_a.shape[3], config.direct_block_r(self.max_rank)
        rank_blocks = triton.cdiv(self.max_rank, block_r)
        return self._stage(
            direct_shrink_kernel,
            (self.num_pairs * rank_blocks * tiles.splits,),
            (*names, "topk_ids", *self._ids(True), "lora_ranks"),
            values,
            (
                *self._sizes(call), rank_blocks, in_features, x_stride,
                lora_a.stride(0), 0 if lora_a.shape[1] == 1 else lora_a.stride(1), lora_a.stride(2),
                num_slices * self.rank_width,
            ),
            {
                "ROWS_PER_INPUT": rows_per_input, "TOP_K": self.top_k, "NUM_SLICES": num_slices, "SPLITS": tiles.splits,
                "EVEN_K": in_features % (tiles.splits * tiles.block_k) == 0, "BLOCK_M": 16, "BLOCK_R": block_r,
                "BLOCK_K": tiles.block_k,
            },
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _gate_up(self, call: Call, values: dict[str, Any]) -> Launch:
        names = ("hidden_states", "w13", "w13_bias", "act", "topk_weights" if call.apply_router_weight_on_input else None)
        constants = {
            "W_TMA": self.w13_descriptor, "SPLITS": self.tiles.shrink13.splits, "ACTIVATION": call.activation,
            "GATED": call.gated, "INTERLEAVED": call.interleaved,
        }  # fmt: skip
        a2 = call.lora_a2 if self.sums else None
        a2_strides = (0, 0, 0, 0)
        if a2 is not None:
            a2_strides = (a2.stride(0), 0 if a2.shape[1] == 1 else a2.stride(1), a2.stride(2), self.rank_width)
        more = (self.num_slices * self.rank_width, *a2_strides, call.swiglu_alpha, call.swiglu_limit)
        lora = ("z13", "lora_b13", *((None, None) if a2 is None else ("lora_a2", "z2")))
        return self._gemm(
            direct_gate_up_kernel, call, values, self.tiles.gate_up, names, lora, (self.x_stride,), more, constants
        )

    def _down(self, call: Call, values: dict[str, Any]) -> Launch:
        names = ("act", "w2", "w2_bias", "rows", None if call.apply_router_weight_on_input else "topk_weights")
        splits = self.sums or self.tiles.shrink2.splits
        constants = {"W_TMA": self.w2_descriptor, "SPLITS": splits, "FUSED": self.sums > 0}
        more, lora = (self.rank_width,), ("z2", "lora_b2")
        return self._gemm(direct_down_kernel, call, values, self.tiles.down, names, lora, (), more, constants)

    def _gemm(
        self, kernel: Any, call: Call, values: dict[str, Any], tiles: config.Gemm, names: Sequence[str | None],
        lora: tuple[str | None, ...], strides: tuple[int, ...], more: tuple[float | None, ...], constants: dict[str, Any],
    ) -> Launch:  # fmt: skip
        """`lora`: z and B of this projection, and of gate_up A and z of the next where it computes them."""
        weight: Tensor = getattr(call, str(names[1]))
        bias, lora_b = getattr(call, f"{names[1]}_bias"), values[str(lora[1])]
        vec, b_strides = (1, (0, 0, 0)) if lora_b is None else self._b_strides(lora_b)
        used = lora_b is not None or any(lora[2:])
        adapters = (*((None, None) if lora_b is None else lora[:2]), *lora[2:], "lora_ranks" if used else None)
        width = self.hidden_size if names[0] == "act" else self.intermediate_size
        return self._stage(
            kernel,
            (self.num_pairs * triton.cdiv(width, tiles.block_n),),
            (*names, "topk_ids", *self._ids(used), *adapters),
            values,
            (
                *self._sizes(call), self.hidden_size, self.intermediate_size, *strides, weight.stride(0), weight.stride(1),
                0 if bias is None else bias.stride(0), *b_strides, *more,
            ),
            {
                "TOP_K": self.top_k, "VEC": vec, "EVEN_K": weight.shape[2] % tiles.block_k == 0, "BLOCK_M": 16,
                "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "BLOCK_R": config.direct_block_r(self.max_rank),
                **constants,
            },
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    @staticmethod
    def _ids(lora: bool) -> tuple[str | None, ...]:
        return ("token_lora_mapping", "adapter_enabled", "expert_map") if lora else (None, None, "expert_map")

    def _sizes(self, call: Call) -> tuple[int, ...]:
        num_global_experts = 0 if call.expert_map is None else call.expert_map.shape[0]
        return self.num_pairs, self.num_experts, num_global_experts, self.max_loras, self.max_rank


def make_plan(call: Call, tiles: config.Experts | None = None, device: torch.device | None = None) -> BasePlan:
    """The plan of a call, by its own configuration or the given one. Compiles what is not compiled yet."""
    tiles = tiles or config.experts(problem(call), config.describe(device or call.hidden_states.device))
    return (DirectPlan if tiles.direct else Plan)(call, tiles, device)


def problem(call: Call) -> config.Problem:
    num_experts, hidden_size, intermediate_size = call.w2.shape
    slices = 2 if call.gated else 1
    return config.Problem(call.topk_ids.numel(), num_experts, hidden_size, intermediate_size, slices, call.hidden_states.dtype)


_PLANS: dict[Any, BasePlan] = {}  # compiled launches; a plan never changes, so threads may race to make one
_MAX_PLANS = 4096


def run_known(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The layer op by the plan of an earlier call like this one, or None, and nothing done, where there was none.

    All that `meta.fused_experts_lora.check` looks at is in the key of a plan: arguments as of a checked call need no check.

    Args: the op's arguments as the dispatcher hands them out: all of the schema's positional ones, others by name.
    """
    try:
        key, addresses = key_of(args, kwargs)
    except RuntimeError:  # a tensor without memory or strides: the checks say it better
        return None
    plan = _PLANS.get(key)
    if plan is None:
        return None
    if plan.launches is not None and not plan.copies:
        if torch._C._cuda_getDevice() == plan.device.index:
            out = plan.run_list(args[0], addresses)
        else:
            with on_device(plan.device):
                out = plan.run_list(args[0], addresses)
        if out is not None:
            return out
    with on_device(plan.device):
        return plan.run(prepare(*args, **kwargs))


def fused_experts_lora(*args: Any, **kwargs: Any) -> Tensor:
    """The layer op on checked arguments, whose plan is kept: see `moelora_ops.fused_experts_lora`."""
    call = prepare(*args, **kwargs)
    x, (num_experts, hidden_size, _) = call.hidden_states, call.w2.shape
    if 0 in (call.topk_ids.numel(), num_experts, hidden_size):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    key, addresses = key_of(args, kwargs)
    with on_device(x.device):
        plan = _PLANS.get(key)
        if plan is None:
            if len(_PLANS) >= _MAX_PLANS:  # a size of batch and a set of strides each: never in serving
                _PLANS.clear()
            plan = make_plan(call)
            plan.copies = any(t is not None and t.data_ptr() != at for t, at in zip(call.tensors(), addresses))
            _PLANS[key] = plan
        return plan.run(call)
