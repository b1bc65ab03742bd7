"""Launcher of the layer op: route, shrink, gate_up, shrink, down, combine.

Everything about a call that its sizes, strides, types and flags decide is a `Plan`, made once and kept: compiled kernels with
their grids and scalars. A call looks its plan up, allocates scratch and hands out addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...routing import RoutingSizes
from .. import config
from ._common import has_pdl, on_device
from ._launch import Launch, current_stream
from .combine import combine_kernel
from .direct import direct_down_kernel, direct_gate_up_kernel
from .down import down_kernel
from .gate_up import gate_up_kernel
from .route import route
from .shrink import shrink_kernel


class Call(NamedTuple):
    """The arguments of one call, checked, contiguous where they are small; adapters of no slots or ranks are None."""

    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    token_lora_mapping: Tensor
    lora_a13: Tensor | None
    lora_b13: Tensor | None
    lora_a2: Tensor | None
    lora_b2: Tensor | None
    lora_ranks: Tensor | None
    adapter_enabled: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    activation: str
    gated: bool
    interleaved: bool
    swiglu_alpha: float
    swiglu_limit: float | None
    apply_router_weight_on_input: bool
    routed_scaling_factor: float

    def key(self) -> tuple[Any, ...]:
        """Whatever a plan depends on; the values of tensors and their addresses beyond 16-byte alignment are not among it."""
        tensors = self[:15]
        shapes = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)
        return self.hidden_states.device, shapes, self[15:]


class Plan:
    """The launches of every call with the same `Call.key`."""

    def __init__(self, call: Call, tiles: config.Experts, device: torch.device | None = None) -> None:
        """`device` is for calls made of meta tensors, which have no memory."""
        x, w2 = call.hidden_states, call.w2
        self.device, self.dtype, self.tiles = device or x.device, x.dtype, tiles
        self.num_tokens, self.top_k = call.topk_ids.shape
        self.num_pairs = self.num_tokens * self.top_k
        self.num_experts, self.hidden_size, self.intermediate_size = w2.shape
        self.num_slices = 2 if call.gated else 1
        slots = [b for b in (call.lora_b13, call.lora_b2) if b is not None]
        self.max_loras, self.max_rank = (slots[0].shape[0], slots[0].shape[3]) if slots else (0, 0)
        self.pdl = has_pdl(self.device)
        # The kernels only look at types and alignment while they are compiled: one empty buffer stands for all scratch.
        self._build(call, x.new_empty(16))

    def _build(self, call: Call, scratch: Tensor) -> None:
        tiles, tables = self.tiles, scratch.view(torch.int32)
        self.rank_width = 16 * triton.cdiv(self.max_rank, 16)  # columns of z of one slice: whole rank tiles
        self.sizes = RoutingSizes.of(
            self.num_pairs, self.num_experts, self.max_loras, self.max_rank, tiles.gate_up.block_m, tiles.segment_m
        )
        x = call.hidden_states
        self.shrink13 = self._shrink(call, x, call.lora_a13, tiles.shrink13, self.top_k, self.num_slices, tables, scratch)
        self.gate_up = self._gate_up(call, tables, scratch)
        self.shrink2 = self._shrink(call, scratch, call.lora_a2, tiles.shrink2, 0, 1, tables, scratch)
        self.down = self._down(call, tables, scratch)
        self.combine = self._combine(call, scratch)

    def _combine(self, call: Call, scratch: Tensor) -> Launch:
        return Launch(
            combine_kernel,
            (self.num_tokens, triton.cdiv(self.hidden_size, self.tiles.combine_n)),
            (scratch, call.topk_ids, call.expert_map, scratch),
            (
                self.num_experts, 0 if call.expert_map is None else call.expert_map.shape[0], self.hidden_size,
                call.routed_scaling_factor,
            ),
            {"TOP_K": self.top_k, "BLOCK_N": self.tiles.combine_n, "USE_PDL": self.pdl},
            device=self.device, num_warps=4,
        )  # fmt: skip

    def _z(self, splits: int) -> torch.dtype:
        """fp32 for partial sums, the dtype of the inputs where the sum is whole."""
        return torch.float32 if splits > 1 else self.dtype

    def _shrink(
        self, call: Call, x: Tensor, lora_a: Tensor | None, tiles: config.Shrink, rows_per_input: int, num_slices: int,
        tables: Tensor, scratch: Tensor,
    ) -> Launch | None:  # fmt: skip
        if lora_a is None:
            return None
        in_features = lora_a.shape[3]
        block_r = config.block_r(self.max_rank)
        rank_blocks = triton.cdiv(self.max_rank, block_r)
        work = self.sizes.num_segment_blocks * rank_blocks * tiles.splits
        return Launch(
            shrink_kernel,
            (min(work, config.MAX_SHRINK_PROGRAMS),),
            (x, lora_a, scratch.view(self._z(tiles.splits)), tables, call.lora_ranks),
            (
                self.num_pairs, self.num_experts, self.max_loras, self.max_rank, self.sizes.segment_blocks_at, rank_blocks,
                in_features, self.intermediate_size if rows_per_input == 0 else x.stride(0),
                lora_a.stride(0), 0 if lora_a.shape[1] == 1 else lora_a.stride(1), lora_a.stride(2),
                num_slices * self.rank_width,
            ),
            {
                "ROWS_PER_INPUT": rows_per_input, "NUM_SLICES": num_slices, "SPLITS": tiles.splits,
                "EVEN_K": in_features % (tiles.splits * tiles.block_k) == 0, "BLOCK_M": self.tiles.segment_m,
                "BLOCK_R": block_r, "BLOCK_K": tiles.block_k, "USE_PDL": self.pdl,
            },
            device=self.device, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _b_strides(self, lora_b: Tensor) -> tuple[int, tuple[int, ...]]:
        """(elements that one load of B may take, strides of slot, expert and row in units of them)."""
        strides = (lora_b.stride(0), 0 if lora_b.shape[1] == 1 else lora_b.stride(1), lora_b.stride(2))
        vec = 8 if self.dtype.itemsize == 2 and all(s % 8 == 0 for s in (*strides, lora_b.data_ptr() // 2)) else 1
        vec = vec if self.max_rank % 8 == 0 else 1  # a vector past the pool's rank may be past the end of B
        return vec, tuple(s // vec for s in strides)

    def _expand(self, lora_b: Tensor | None, splits: int, num_slices: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Constants and strides that gate_up and down have for the adapters' part."""
        if lora_b is None:
            return {"SPLITS": 1, "VEC": 1, "WAIT_LATE": False}, (0, 0, 0, 0)
        vec, strides = self._b_strides(lora_b)
        return {"SPLITS": splits, "VEC": vec, "WAIT_LATE": True}, (*strides, num_slices * self.rank_width)

    def _gate_up(self, call: Call, tables: Tensor, scratch: Tensor) -> Launch:
        tiles, w13 = self.tiles.gate_up, call.w13
        constants, strides = self._expand(call.lora_b13, self.tiles.shrink13.splits, self.num_slices)
        self.w13_descriptor = tiles.tma and _describable(w13)
        weights_in = call.topk_weights if call.apply_router_weight_on_input else None
        return Launch(
            gate_up_kernel,
            (self.sizes.num_expert_blocks * triton.cdiv(self.intermediate_size, tiles.block_n),),
            (
                call.hidden_states, self._describe_w13(call) if self.w13_descriptor else w13, call.w13_bias, scratch, weights_in,
                None if call.lora_b13 is None else scratch.view(self._z(self.tiles.shrink13.splits)), call.lora_b13,
                call.lora_ranks if call.lora_b13 is not None else None, tables,
            ),
            (
                *self._sizes(), self.hidden_size, self.intermediate_size, call.hidden_states.stride(0),
                w13.stride(0), w13.stride(1), 0 if call.w13_bias is None else call.w13_bias.stride(0), *strides,
                call.swiglu_alpha, call.swiglu_limit,
            ),
            {
                "ACTIVATION": call.activation, "GATED": call.gated, "INTERLEAVED": call.interleaved, "TOP_K": self.top_k,
                "W_TMA": self.w13_descriptor, **constants, **self._gemm(tiles, self.hidden_size),
            },
            device=self.device, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _down(self, call: Call, tables: Tensor, scratch: Tensor) -> Launch:
        tiles, w2 = self.tiles.down, call.w2
        constants, strides = self._expand(call.lora_b2, self.tiles.shrink2.splits, 1)
        self.w2_descriptor = tiles.tma and _describable(w2)
        weights_out = None if call.apply_router_weight_on_input else call.topk_weights
        return Launch(
            down_kernel,
            (self.sizes.num_expert_blocks * triton.cdiv(self.hidden_size, tiles.block_n),),
            (
                scratch, self._describe_w2(call) if self.w2_descriptor else w2, call.w2_bias, scratch, weights_out,
                None if call.lora_b2 is None else scratch.view(self._z(self.tiles.shrink2.splits)), call.lora_b2,
                call.lora_ranks if call.lora_b2 is not None else None, tables,
            ),
            (
                *self._sizes(), self.hidden_size, self.intermediate_size, w2.stride(0), w2.stride(1),
                0 if call.w2_bias is None else call.w2_bias.stride(0), *strides,
            ),
            {"W_TMA": self.w2_descriptor, **constants, **self._gemm(tiles, self.intermediate_size)},
            device=self.device, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _sizes(self) -> tuple[int, ...]:
        s = self.sizes
        return (
            self.num_pairs, self.num_experts, self.max_loras, self.max_rank, s.expert_blocks_at, s.tiles_at, s.num_expert_blocks,
        )  # fmt: skip

    def _gemm(self, tiles: config.Gemm, in_features: int) -> dict[str, Any]:
        return {
            "EVEN_K": in_features % tiles.block_k == 0, "BLOCK_M": tiles.block_m, "TAIL_M": tiles.tail_m,
            "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "GROUP_M": tiles.group_m, "USE_PDL": self.pdl,
        }  # fmt: skip

    def _describe_w13(self, call: Call) -> TensorDescriptor:
        """[E, 2, I, H], or [E, I, 2, H] where gate and up alternate: rows past I read as zero."""
        w13, tiles, width = call.w13, self.tiles.gate_up, self.intermediate_size
        expert, row = w13.stride(0), w13.stride(1)
        if call.interleaved:
            shape, strides, block = [width, 2], [2 * row, row], [tiles.block_n, 1]
        else:
            shape, strides, block = [self.num_slices, width], [width * row, row], [1, tiles.block_n]
        shape = [self.num_experts, *shape, self.hidden_size]
        return TensorDescriptor(w13, shape, [expert, *strides, 1], [1, *block, tiles.block_k])

    def _describe_w2(self, call: Call) -> TensorDescriptor:
        tiles, (expert, row, _) = self.tiles.down, call.w2.stride()
        shape = [self.num_experts, 1, self.hidden_size, self.intermediate_size]
        return TensorDescriptor(call.w2, shape, [expert, expert, row, 1], [1, 1, tiles.block_n, tiles.block_k])

    def run(self, call: Call) -> Tensor:
        """Launch everything on the current stream.

        Scratch: act [P, I] and rows [P, H] in the dtype of the inputs, z [splits, P, S * R] of one projection at a time. None
        of it is filled first: each stage reads only what one before it wrote.
        """
        x, lora = call.hidden_states, self.max_loras > 0
        routing = route(
            call.topk_ids, call.token_lora_mapping, num_experts=self.num_experts, max_loras=self.max_loras,
            max_rank=self.max_rank, lora_ranks=call.lora_ranks, adapter_enabled=call.adapter_enabled if lora else None,
            expert_map=call.expert_map, block_m=self.tiles.gate_up.block_m, segment_m=self.tiles.segment_m,
        )  # fmt: skip
        tables, stream = routing.tables, current_stream(self.device)
        z = None
        if self.shrink13 is not None:
            z = self._new_z(self.tiles.shrink13.splits, self.num_slices)
            self.shrink13(stream, x, call.lora_a13, z, tables, call.lora_ranks)
        act = x.new_empty((self.num_pairs, self.intermediate_size))
        self.gate_up(
            stream, x, self._describe_w13(call) if self.w13_descriptor else call.w13, call.w13_bias, act,
            call.topk_weights if call.apply_router_weight_on_input else None, z, call.lora_b13,
            None if z is None else call.lora_ranks, tables,
        )  # fmt: skip
        z = None
        if self.shrink2 is not None:
            z = self._new_z(self.tiles.shrink2.splits, 1)
            self.shrink2(stream, act, call.lora_a2, z, tables, call.lora_ranks)
        rows = x.new_empty((self.num_pairs, self.hidden_size))
        self.down(
            stream, act, self._describe_w2(call) if self.w2_descriptor else call.w2, call.w2_bias, rows,
            None if call.apply_router_weight_on_input else call.topk_weights, z, call.lora_b2,
            None if z is None else call.lora_ranks, tables,
        )  # fmt: skip
        out = x.new_empty((self.num_tokens, self.hidden_size))
        self.combine(stream, rows, call.topk_ids, call.expert_map, out)
        return out

    def _new_z(self, splits: int, num_slices: int) -> Tensor:
        shape = (splits, self.num_pairs, num_slices * self.rank_width)
        return torch.empty(shape, dtype=self._z(splits), device=self.device)


class DirectPlan(Plan):
    """gate_up, down, combine: for batches of a few pairs (see `direct`)."""

    def _build(self, call: Call, scratch: Tensor) -> None:
        self.gate_up = self._direct(call, call.hidden_states, call.w13, call.w13_bias, call.lora_a13, call.lora_b13, scratch)
        self.down = self._direct(call, scratch, call.w2, call.w2_bias, call.lora_a2, call.lora_b2, scratch)
        self.combine = self._combine(call, scratch)

    def _direct(
        self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        scratch: Tensor,
    ) -> Launch:  # fmt: skip
        first = weight is call.w13
        tiles = self.tiles.gate_up if first else self.tiles.down
        described = tiles.tma and _describable(weight)
        vec, b_strides = (1, (0, 0, 0)) if lora_b is None else self._b_strides(lora_b)
        a_strides = (0, 0, 0)
        if lora_a is not None:
            a_strides = (lora_a.stride(0), 0 if lora_a.shape[1] == 1 else lora_a.stride(1), lora_a.stride(2))
        constants = {
            "TOP_K": self.top_k, "W_TMA": described, "VEC": vec, "EVEN_K": weight.shape[2] % tiles.block_k == 0,
            "BLOCK_M": 16, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "BLOCK_R": config.direct_block_r(self.max_rank),
            "USE_PDL": self.pdl,
        }  # fmt: skip
        scalars = (
            self.num_experts, 0 if call.expert_map is None else call.expert_map.shape[0], self.max_loras, self.max_rank,
            self.hidden_size, self.intermediate_size, *((x.stride(0),) if first else ()), weight.stride(0), weight.stride(1),
            0 if bias is None else bias.stride(0), *a_strides, *b_strides,
        )  # fmt: skip
        if first:
            self.w13_descriptor = described
            scalars += (call.swiglu_alpha, call.swiglu_limit)
            constants |= {"ACTIVATION": call.activation, "GATED": call.gated, "INTERLEAVED": call.interleaved}
            weight_argument: Any = self._describe_w13(call) if described else weight
        else:
            self.w2_descriptor = described
            weight_argument = self._describe_w2(call) if described else weight
        return Launch(
            direct_gate_up_kernel if first else direct_down_kernel,
            (self.num_pairs * triton.cdiv(self.intermediate_size if first else self.hidden_size, tiles.block_n),),
            (
                x, weight_argument, bias, scratch, call.topk_weights if call.apply_router_weight_on_input == first else None,
                call.topk_ids, *self._lora(call, lora_a, lora_b),
            ),
            scalars, constants, device=self.device, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    @staticmethod
    def _lora(call: Call, lora_a: Tensor | None, lora_b: Tensor | None) -> tuple[Tensor | None, ...]:
        """mapping, enabled, expert_map, A, B and ranks as both kernels take them: without adapters all but the map are None."""
        if lora_a is None:
            return None, None, call.expert_map, None, None, None
        return call.token_lora_mapping, call.adapter_enabled, call.expert_map, lora_a, lora_b, call.lora_ranks

    def run(self, call: Call) -> Tensor:
        x, stream = call.hidden_states, current_stream(self.device)
        weights_in, weights_out = (call.topk_weights, None) if call.apply_router_weight_on_input else (None, call.topk_weights)
        act = x.new_empty((self.num_pairs, self.intermediate_size))
        self.gate_up(
            stream, x, self._describe_w13(call) if self.w13_descriptor else call.w13, call.w13_bias, act, weights_in,
            call.topk_ids, *self._lora(call, call.lora_a13, call.lora_b13),
        )  # fmt: skip
        rows = x.new_empty((self.num_pairs, self.hidden_size))
        self.down(
            stream, act, self._describe_w2(call) if self.w2_descriptor else call.w2, call.w2_bias, rows, weights_out,
            call.topk_ids, *self._lora(call, call.lora_a2, call.lora_b2),
        )  # fmt: skip
        out = x.new_empty((self.num_tokens, self.hidden_size))
        self.combine(stream, rows, call.topk_ids, call.expert_map, out)
        return out


def make_plan(call: Call, tiles: config.Experts | None = None, device: torch.device | None = None) -> Plan:
    """The plan of a call, by its own configuration or the given one. Compiles what is not compiled yet."""
    tiles = tiles or config.experts(problem(call), config.describe(device or call.hidden_states.device))
    return (DirectPlan if tiles.direct else Plan)(call, tiles, device)


def problem(call: Call) -> config.Problem:
    num_experts, hidden_size, intermediate_size = call.w2.shape
    slices = 2 if call.gated else 1
    return config.Problem(
        call.topk_ids.numel(), num_experts, hidden_size, intermediate_size, slices, call.hidden_states.dtype
    )


def _describable(weight: Tensor) -> bool:
    """Whether the copy engine can read a weight: 16-byte addresses and strides, contiguous rows."""
    item = weight.element_size()
    aligned = all(n % 16 == 0 for n in (weight.data_ptr(), weight.stride(0) * item, weight.stride(1) * item))
    return aligned and weight.stride(2) == 1 and item == 2


_PLANS: dict[Any, Plan] = {}  # compiled launches; a plan never changes, so threads may race to make one
_MAX_PLANS = 4096


def plan(call: Call) -> Plan:
    """The plan of a call, made on first use."""
    key = call.key()
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) >= _MAX_PLANS:  # a size of batch and a set of strides each: never in serving
            _PLANS.clear()
        found = _PLANS[key] = make_plan(call)
    return found


def fused_experts_lora(hidden_states: Tensor, w13: Tensor, w2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The layer op on checked arguments: see `moelora_ops.fused_experts_lora`."""
    call = prepare(hidden_states, w13, w2, *args, **kwargs)
    if 0 in (call.topk_ids.numel(), w2.shape[0], w2.shape[1]):
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    with on_device(hidden_states.device):
        return plan(call).run(call)


def prepare(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
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
) -> Call:
    """The op's arguments as its kernels take them."""
    if lora_b13 is None or 0 in (lora_b13.shape[0], lora_b13.shape[3]):
        lora_a13 = lora_b13 = None
    if lora_b2 is None or 0 in (lora_b2.shape[0], lora_b2.shape[3]):
        lora_a2 = lora_b2 = None
    return Call(
        hidden_states, w13, w2, topk_weights.contiguous(), topk_ids.contiguous(), token_lora_mapping.contiguous(),
        lora_a13, lora_b13, lora_a2, lora_b2, None if lora_ranks is None else lora_ranks.contiguous(),
        adapter_enabled, w13_bias, w2_bias, None if expert_map is None else expert_map.contiguous(),
        activation, gated, interleaved, swiglu_alpha, swiglu_limit, apply_router_weight_on_input, routed_scaling_factor,
    )  # fmt: skip
