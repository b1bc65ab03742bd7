"""What the plans of the layer op share: sizes, scratch, the tensors' names, and how a call runs."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import config
from ._common import has_copy_engine, has_pdl
from ._launch import Launch, LaunchList, Scratch, Slot, current_stream
from .call import TENSORS, Call
from .combine import combine_kernel

_SCRATCH, _OUT = len(TENSORS), len(TENSORS) + 1  # the addresses of a call: its tensors, scratch, the result


class BasePlan:
    """The launches of every call with the same `call.key_of`, as stages in their order.

    The tensors of a stage have names: an argument of the op, a section of scratch, or `out`.
    """

    copies = False  # whether the kernels take copies of some arguments, so that the op's own addresses do not serve
    launches: LaunchList | None = None  # all stages in one: made by the first run, where that is possible
    listable = True

    def __init__(self, call: Call, tiles: config.Experts, device: torch.device | None = None) -> None:
        """`device` is for calls made of meta tensors, which have no memory."""
        x, w2 = call.hidden_states, call.w2
        self.device, self.dtype, self.tiles = device or x.device, x.dtype, tiles
        self.num_tokens, self.top_k = call.topk_ids.shape
        self.num_pairs = self.num_tokens * self.top_k
        self.num_experts, self.hidden_size, self.intermediate_size = w2.shape
        self.num_slices = 2 if call.gated else 1
        # Of a single row any stride is right: with the one that batches have, no kernel is compiled for it alone.
        self.x_stride = x.stride(0) if self.num_tokens > 1 else self.hidden_size
        slots = [b for b in (call.lora_b13, call.lora_b2) if b is not None]
        self.max_loras, self.max_rank = (slots[0].shape[0], slots[0].shape[3]) if slots else (0, 0)
        self.pdl = tiles.pdl and has_pdl(self.device)
        engine = has_copy_engine(self.device)
        self.w13_descriptor = engine and tiles.gate_up.tma and _describable(call.w13)
        self.merged = self.w13_descriptor and tiles.gate_up.merged and call.gated and not tiles.direct
        self.w2_descriptor = engine and tiles.down.tma and _describable(call.w2)
        self.rank_width = 16 * triton.cdiv(self.max_rank, 16)  # columns of z of one slice: whole rank tiles
        self.scratch = Scratch(self.dtype)
        self._lay_out(call)
        self.scratch_numel = self.scratch.numel
        # The kernels only look at types and alignment while they are compiled: one small buffer stands for all scratch.
        empty = x.new_empty(16)
        memory = {name: empty.view(dtype) for name, (_, _, dtype) in self.scratch.sections.items()}
        self.stages = self._build(call, self._values(call, {**memory, "out": empty}))

    def _lay_out(self, call: Call) -> None:
        """Add the sections of scratch."""
        raise NotImplementedError

    def _add_z(self, name: str, tiles: config.Shrink, num_slices: int, at: int) -> int:
        """fp32 for partial sums, the dtype of the inputs where the sum is whole."""
        dtype = torch.float32 if tiles.splits > 1 else self.dtype
        return self.scratch.add(name, tiles.splits * self.num_pairs * num_slices * self.rank_width, dtype, at=at)

    def _build(self, call: Call, values: dict[str, Any]) -> list[Launch]:
        """The stages; `values` have the types of the tensors."""
        raise NotImplementedError

    def _prepare(self, call: Call, memory: dict[str, Tensor]) -> None:
        """What comes before the stages, where they are launched one by one."""

    def _prepare_words(self, call: Call, slots: dict[str, Slot]) -> list[int] | None:
        """The same as part of a program; None where it is none."""
        return []

    def _values(self, call: Call, memory: dict[str, Tensor]) -> dict[str, Any]:
        """What the names of the stages' tensors stand for."""
        values: dict[str, Any] = {**dict(zip(TENSORS, call)), **memory}
        if self.w13_descriptor:
            values["w13"] = self._describe_w13(call)
        if self.w2_descriptor:
            values["w2"] = self._describe_w2(call)
        return values

    def run(self, call: Call) -> Tensor:
        """Launch everything on the current stream of the plan's device, which is the current device.

        None of the scratch is filled first: each stage reads only what one before it wrote.
        """
        x = call.hidden_states
        if self.launches is None and self.listable and x.is_cuda:
            self.launches = self._list(call)
            self.listable = self.launches is not None
        if self.launches is not None:
            listed = self.run_list(x, [0 if t is None else t.data_ptr() for t in call.tensors()])
            if listed is not None:
                return listed
        values, stream = self.bind(call), current_stream(self.device)
        for stage in self.stages:
            stage(stream, *(name and values[name] for name in stage.names))
        out: Tensor = values["out"]
        return out

    def bind(self, call: Call) -> dict[str, Any]:
        """What the names of the stages' tensors stand for, in new memory, with what comes before the stages done."""
        x = call.hidden_states
        memory = self.scratch.views(x.new_empty(self.scratch_numel))
        memory["out"] = x.new_empty(self.num_tokens, self.hidden_size)
        self._prepare(call, memory)
        return self._values(call, memory)

    def run_list(self, x: Tensor, addresses: list[int]) -> Tensor | None:
        """The same in one call of C, given the addresses of the op's tensors; None where that turns out not to be served."""
        scratch, out = x.new_empty(self.scratch_numel), x.new_empty(self.num_tokens, self.hidden_size)
        addresses += (scratch.data_ptr(), out.data_ptr())
        launches = self.launches
        if launches is not None and launches(torch._C._cuda_getCurrentRawStream(x.get_device()), addresses):
            return out
        self.launches, self.listable = None, False
        return None

    def _list(self, call: Call) -> LaunchList | None:
        slots = {name: Slot(at) for at, name in enumerate(TENSORS)}
        slots |= {name: Slot(_SCRATCH, at) for name, (at, _, _) in self.scratch.sections.items()}
        slots["out"] = Slot(_OUT)
        first = self._prepare_words(call, slots)
        return None if first is None else LaunchList.of(self.stages, slots, len(TENSORS) + 2, first)

    def _stage(
        self, kernel: Any, programs: Sequence[int], names: Sequence[str | None], values: dict[str, Any], scalars: Sequence[Any],
        constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 2,
    ) -> Launch:  # fmt: skip
        tensors = [name and values[name] for name in names]
        return Launch(
            kernel, tuple(programs), tensors, scalars, {**constants, "USE_PDL": self.pdl},
            device=self.device, num_warps=num_warps, num_stages=num_stages, names=names,
        )  # fmt: skip

    def _combine(self, call: Call, values: dict[str, Any]) -> Launch:
        num_global_experts = 0 if call.expert_map is None else call.expert_map.shape[0]
        return self._stage(
            combine_kernel,
            (self.num_tokens, triton.cdiv(self.hidden_size, self.tiles.combine_n)),
            ("rows", "topk_ids", "expert_map", "out"),
            values,
            (self.num_experts, num_global_experts, self.hidden_size, call.routed_scaling_factor),
            {"TOP_K": self.top_k, "BLOCK_N": self.tiles.combine_n},
        )

    def _b_strides(self, lora_b: Tensor) -> tuple[int, tuple[int, ...]]:
        """(elements that one load of B may take, strides of slot, expert and row in units of them)."""
        strides = (lora_b.stride(0), 0 if lora_b.shape[1] == 1 else lora_b.stride(1), lora_b.stride(2))
        vec = 8 if self.dtype.itemsize == 2 and all(s % 8 == 0 for s in (*strides, lora_b.data_ptr() // 2)) else 1
        vec = vec if self.max_rank % 8 == 0 else 1  # a vector past the pool's rank may be past the end of B
        return vec, tuple(s // vec for s in strides)

    def _describe_w13(self, call: Call) -> TensorDescriptor:
        """[E, 2, I, H], or [E, I, 2, H] where gate and up alternate: rows past I read as zero. Merged: tiles of both slices."""
        w13, tiles, width = call.w13, self.tiles.gate_up, self.intermediate_size
        expert, row, slices = w13.stride(0), w13.stride(1), 2 if self.merged else 1
        if call.interleaved:
            shape, strides, block = [width, 2], [2 * row, row], [tiles.block_n, slices]
        else:
            shape, strides, block = [self.num_slices, width], [width * row, row], [slices, tiles.block_n]
        shape = [self.num_experts, *shape, self.hidden_size]
        return TensorDescriptor(w13, shape, [expert, *strides, 1], [1, *block, tiles.block_k])

    def _describe_w2(self, call: Call) -> TensorDescriptor:
        tiles, (expert, row, _) = self.tiles.down, call.w2.stride()
        shape = [self.num_experts, 1, self.hidden_size, self.intermediate_size]
        return TensorDescriptor(call.w2, shape, [expert, expert, row, 1], [1, 1, tiles.block_n, tiles.block_k])


def _describable(weight: Tensor) -> bool:
    """Whether the copy engine can read a weight: 16-byte addresses and strides, contiguous rows."""
    item = weight.element_size()
    aligned = all(n % 16 == 0 for n in (weight.data_ptr(), weight.stride(0) * item, weight.stride(1) * item))
    return aligned and weight.stride(2) == 1 and item == 2
