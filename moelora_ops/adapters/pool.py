"""Slots for adapters at fixed device addresses: what captured and compiled code reads from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import COMPUTE_DTYPES, check_positive, short
from ..errors import AdapterError
from .adapter import PROJECTIONS, LoraAdapter, ProjectionLora
from .factors import check_shapes, check_values, copy_factor
from .geometry import MoeGeometry
from .loading import load_adapter
from .progress import Report, reporter


@dataclass(frozen=True)
class PoolLayer:
    """The pool's tensors of one layer, in the layout of `fused_experts_lora`. L slots, S slices (2 gated, 1 not), R rank.

    In a pool of both kinds of slots these are the first ones, with a row for each expert, and `shared_outer` has the last ones.
    Ranks and switches are shared by all layers of the pool. Copying a module does not copy the pool's tensors.
    """

    lora_a13: Tensor  # [L, E, S * R, H], [L, 1, S * R, H] of shared-outer slots: gate's A in rows 0..R, up's in rows R..2R
    lora_b13: Tensor  # [L, E, S * I, R]: rows [gate | up], or alternating in an interleaved pool
    lora_a2: Tensor  # [L, E, R, I]
    lora_b2: Tensor  # [L, E, H, R], [L, 1, H, R] of shared-outer slots
    lora_ranks: Tensor  # [L] int32
    adapter_enabled: Tensor  # [>= L] int32: with `shared_outer`, of the slots of both kinds
    interleaved: bool = False  # order of the rows of lora_b13
    shared_outer: PoolLayer | None = None  # slots L, L + 1, ... of the pool

    def __deepcopy__(self, memo: object) -> PoolLayer:
        return self  # a copied module must see the loads that follow, and GBs must not double unnoticed


class LoraPool:
    """Adapter slots for all MoE layers of a model.

    The tensors are allocated once and never move: `load` and `unload` copy in place, so captured CUDA graphs and compiled code
    see the new adapter at their next run. Work of a slot follows its own rank, and a slot that is empty or disabled is "no
    adapter". Loads and runs belong on the same stream: a load between two graph replays is then seen whole by the second.
    A deep copy of a pool, or of a module that has one, is the same pool.

    A slot is of one of two kinds. Most have a row for each expert and hold any adapter. *Shared-outer* slots have A of gate and
    up and B of down once for all experts, and hold adapters that share these: with E experts they need (3RI + 3RH / E) elements
    per layer and expert instead of 3RI + 3RH. In a pool of both kinds `MoeRunner` runs the layer once for each kind, on its own
    tokens: where tokens of both choose the same expert, its base weights are read twice.

    Args:
        layers: number of MoE layers (ids 0, 1, ...) or their ids in the base model.
        max_loras: slots L. max_rank: rank R of the slots; an adapter's own rank may be smaller.
        num_experts, hidden_size, intermediate_size: E, H, I of the experts.
        gated: gate and up projection (S = 2), or up alone. interleaved: rows of lora_b13 alternate gate, up, like w13.
        dtype: fp32, bf16 or fp16. device: where the tensors live.
        shared_outer: how many slots, the last ones, are shared-outer; True: all.

    Raises: ValueError, TypeError naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        layers: int | Sequence[int],
        *,
        max_loras: int,
        max_rank: int,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        gated: bool = True,
        interleaved: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        shared_outer: bool | int = False,
    ) -> None:
        if isinstance(layers, int):
            check_positive("layers", layers)
            layers = range(layers)
        if not isinstance(layers, Sequence) or not all(type(layer_id) is int for layer_id in layers):
            raise TypeError(f"layers must be an int or a sequence of ints, got {layers!r}")
        self.layer_ids: tuple[int, ...] = tuple(layers)
        if not self.layer_ids or len(set(self.layer_ids)) < len(self.layer_ids) or min(self.layer_ids) < 0:
            raise ValueError(f"layers must be different ids >= 0, at least one, got {self.layer_ids}")
        check_positive("max_loras", max_loras, least=0)
        for name, size in (
            ("max_rank", max_rank),
            ("num_experts", num_experts),
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
        ):
            check_positive(name, size)
        if interleaved and not gated:
            raise ValueError("interleaved=True needs gated=True (it orders gate and up rows), got gated=False")
        if dtype not in COMPUTE_DTYPES:
            raise TypeError(f"dtype must be {short(COMPUTE_DTYPES)}, got {dtype}")
        if shared_outer is True or shared_outer is False:
            shared_outer = max_loras if shared_outer else 0
        check_positive("shared_outer", shared_outer, least=0)
        if shared_outer > max_loras:
            raise ValueError(f"shared_outer must be <= max_loras = {max_loras}, got {shared_outer}")
        self.max_loras, self.max_rank, self.shared_outer = max_loras, max_rank, shared_outer
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.gated, self.interleaved, self.dtype = gated, interleaved, dtype
        self._device = torch.device(device)
        self._geometry: MoeGeometry | None = None  # of from_config: what reading a file needs to know of the base
        self.lora_ranks: Tensor = self._fixed(max_loras, dtype=torch.int32)
        self.adapter_enabled: Tensor = self._fixed(max_loras, dtype=torch.int32)
        self._layers = {layer_id: self._make_layer() for layer_id in self.layer_ids}
        # None: empty. Host copies, so that asking never waits for the device.
        self._ranks: list[int | None] = [None] * max_loras
        self._enabled = [False] * max_loras

    def _fixed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        with torch.inference_mode(False):  # engines build models inside it: its tensors could not be loaded outside
            return _static(torch.zeros(shape, dtype=dtype or self.dtype, device=self._device))

    def _make_layer(self) -> PoolLayer:
        per_expert = self.max_loras - self.shared_outer
        if per_expert == 0 or self.shared_outer == 0:
            return self._make_slots(
                self.max_loras, self.num_experts if per_expert else 1, self.lora_ranks, self.adapter_enabled
            )
        last = self._make_slots(
            self.shared_outer, 1, _static(self.lora_ranks[per_expert:]), _static(self.adapter_enabled[per_expert:])
        )
        first = self._make_slots(per_expert, self.num_experts, _static(self.lora_ranks[:per_expert]), self.adapter_enabled)
        return dataclasses.replace(first, shared_outer=last)

    def _make_slots(self, num_slots: int, outer_experts: int, ranks: Tensor, enabled: Tensor) -> PoolLayer:
        slices, num_experts = 2 if self.gated else 1, self.num_experts
        return PoolLayer(
            lora_a13=self._fixed(num_slots, outer_experts, slices * self.max_rank, self.hidden_size),
            lora_b13=self._fixed(num_slots, num_experts, slices * self.intermediate_size, self.max_rank),
            lora_a2=self._fixed(num_slots, num_experts, self.max_rank, self.intermediate_size),
            lora_b2=self._fixed(num_slots, outer_experts, self.hidden_size, self.max_rank),
            lora_ranks=ranks,
            adapter_enabled=enabled,
            interleaved=self.interleaved,
        )

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        shared_outer: bool | int = False,
    ) -> LoraPool:
        """A pool for the MoE layers of a transformers config, its dict, or the path of a config.json."""
        geometry = config if isinstance(config, MoeGeometry) else MoeGeometry.from_config(config)
        pool = cls(
            geometry.moe_layers,
            max_loras=max_loras,
            max_rank=max_rank,
            num_experts=geometry.num_experts,
            hidden_size=geometry.hidden_size,
            intermediate_size=geometry.intermediate_size,
            gated=geometry.gated,
            interleaved=geometry.interleaved,
            dtype=dtype,
            device=device,
            shared_outer=shared_outer,
        )
        pool._geometry = geometry
        return pool

    def __deepcopy__(self, memo: object) -> LoraPool:
        return self

    def layer(self, layer_id: int) -> PoolLayer:
        """The tensors of one layer; always the same objects."""
        if layer_id not in self._layers:
            raise ValueError(f"layer_id must be one of {self.layer_ids}, got {layer_id!r}")
        return self._layers[layer_id]

    def rank(self, slot: int) -> int:
        """Rank of the slot's adapter, 0 when empty. Never waits for the device."""
        return self._ranks[self._check_slot(slot)] or 0

    def is_enabled(self, slot: int) -> bool:
        """Whether the slot holds an adapter that is switched on. Never waits for the device."""
        return self._enabled[self._check_slot(slot)]

    def enable(self, slot: int) -> None:
        """Switch a loaded slot on again."""
        if self._ranks[self._check_slot(slot)] is None:
            raise ValueError(f"slot must hold an adapter to be enabled, got empty slot {slot}")
        self.adapter_enabled[slot].fill_(1)
        self._enabled[slot] = True

    def disable(self, slot: int) -> None:
        """Switch a slot off: its tokens run without an adapter. The weights stay."""
        self.adapter_enabled[self._check_slot(slot)].fill_(0)
        self._enabled[slot] = False

    def free_slot(self, adapter: LoraAdapter) -> int:
        """The first empty slot that can hold the adapter; for a shared-outer one, shared-outer slots first.

        Raises: ValueError when there is none.
        """
        empty = [slot for slot, rank in enumerate(self._ranks) if rank is None]
        shared = [slot for slot in empty if self._is_shared(slot)] if adapter.shared_outer else []
        slots = shared or [slot for slot in empty if not self._is_shared(slot)]
        if not slots:
            raise ValueError(f"{adapter.name}: a free slot must be left, got none of {self.max_loras} that could hold it")
        return slots[0]

    @torch.no_grad()
    def load(
        self,
        adapter: LoraAdapter | str | os.PathLike[str],
        slot: int,
        *,
        progress: bool | Report | None = None,
        **options: Any,
    ) -> None:
        """Copy an adapter into a slot, in place, and enable it; whatever the slot held is replaced.

        The scaling is multiplied into B in fp32 and the product cast once. Everything is read and checked before anything is
        written: a load that raises leaves the slot bitwise as it was. (Only an interruption of the writing itself, such as
        KeyboardInterrupt or a `progress` that raises, leaves it empty.) The pool keeps no copy of the factors.

        Args:
            adapter: from `load_adapter`, or the path for it, in a pool made by `from_config`.
            slot: in [0, max_loras). A shared-outer slot takes shared-outer adapters; in the others, what an adapter shares
                fills the rows of all experts that the slot has anyway.
            progress: a callable (steps done, steps in all); True: a line on stderr; None: the same if stderr is a terminal and
                the load takes more than a second; False: nothing.
            options: of `load_adapter`, with a path.

        Raises: ValueError for a slot out of range; AdapterError where the adapter does not fit the pool or its values do not
            fit the pool's dtype.
        """
        self._check_slot(slot)
        if isinstance(adapter, (str, os.PathLike)) and self._geometry is not None:
            adapter = load_adapter(adapter, self._geometry, **{"max_rank": self.max_rank} | options)
        elif not isinstance(adapter, LoraAdapter):
            raise TypeError(
                f"adapter must be a LoraAdapter, or a path for a pool made by from_config, got {type(adapter).__name__}"
            )
        elif options:
            raise TypeError(f"options must not be given with a LoraAdapter, got {', '.join(options)}")
        report = reporter(progress, adapter.name)
        steps = len(adapter.layers) + len(self.layer_ids)
        layers = self._check_fits(adapter, slot, lambda done: report(done, steps))
        rank = adapter.rank
        self._vacate(slot)  # off while it is half written, should another stream look
        try:
            for done, layer_id in enumerate(self.layer_ids, len(layers) + 1):
                self._write(layer_id, slot, layers.get(layer_id, {}))
                report(done, steps)
        except BaseException:
            self.unload(slot)
            raise
        self.lora_ranks[slot].fill_(rank)
        self._ranks[slot] = rank
        self.enable(slot)

    def unload(self, slot: int) -> None:
        """Empty a slot: disabled, rank 0, zeros."""
        self._vacate(self._check_slot(slot))
        for layer_id in self.layer_ids:
            self._write(layer_id, slot, {})

    def _vacate(self, slot: int) -> None:
        self.disable(slot)
        self.lora_ranks[slot].fill_(0)
        self._ranks[slot] = None

    def _is_shared(self, slot: int) -> bool:
        return slot >= self.max_loras - self.shared_outer

    def _check_slot(self, slot: int) -> int:
        if isinstance(slot, bool) or not isinstance(slot, int):
            raise TypeError(f"slot must be an int, got {type(slot).__name__}")
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot must be in [0, {self.max_loras}), got {slot}")
        return slot

    def _check_fits(
        self, adapter: LoraAdapter, slot: int, report: Callable[[int], None]
    ) -> Mapping[int, Mapping[str, ProjectionLora]]:
        """The adapter's layers, safe to be written to the slot."""
        for name in ("num_experts", "hidden_size", "intermediate_size", "gated"):
            want, got = getattr(self, name), getattr(adapter.geometry, name)
            if want != got:
                raise AdapterError(f"{adapter.name}: {name} must be {want} as in the pool, got {got}")
        layers, own = adapter.layers, self._storages(slot)
        is_own = False
        for done, layer_id in enumerate(layers, 1):
            if layer_id not in self._layers:
                raise AdapterError(f"{adapter.name}: layers must be among the pool's {self.layer_ids}, got {layer_id}")
            for name, lora in layers[layer_id].items():
                a, b = self._check_projection(f"{adapter.name}: layer {layer_id} {name}", name, lora, slot)
                is_own = is_own or not own.isdisjoint((_storage(a), _storage(b)))
            report(done)
        if not is_own:
            return layers
        return {  # views of what will be written
            layer_id: {name: ProjectionLora(p.a.clone(), p.b.clone(), p.scaling) for name, p in projections.items()}
            for layer_id, projections in layers.items()
        }

    def _check_projection(self, where: str, name: str, lora: ProjectionLora, slot: int) -> tuple[Tensor, Tensor]:
        names = PROJECTIONS if self.gated else PROJECTIONS[1:]
        if name not in names:
            raise AdapterError(f"{where} projection must be one of {', '.join(names)}, got {name!r}")
        hidden, inner = self.hidden_size, self.intermediate_size
        size_in, size_out = (inner, hidden) if name == "down" else (hidden, inner)
        a, b, scaling = lora.a, lora.b, lora.scaling
        sizes = {"num_experts": self.num_experts, "size_in": size_in, "size_out": size_out, "max_rank": self.max_rank}
        check_shapes(where, a, b, scaling, **sizes)
        if self._is_shared(slot) and not lora.is_shared(name):
            side, sharers = ("B and scaling", (len(b), len(scaling))) if name == "down" else ("A", (len(a),))
            raise AdapterError(
                f"{where} {side} must be shared by all experts for shared-outer slot {slot}, got {max(sharers)} experts: "
                f"load it into one of the pool's {self.max_loras - self.shared_outer} slots before these"
            )
        check_values(where, a, b, scaling, self.dtype)
        return a, b

    def _storages(self, slot: int) -> set[int]:
        """Addresses of the memory that a load into the slot writes."""
        parts = (self._part(layer_id, slot)[0] for layer_id in self.layer_ids)
        return {_storage(t) for part in parts for t in (part.lora_a13, part.lora_b13, part.lora_a2, part.lora_b2)}

    def _part(self, layer_id: int, slot: int) -> tuple[PoolLayer, int]:
        """The tensors with a slot, and its place there."""
        layer = self._layers[layer_id]
        if layer.shared_outer is None or not self._is_shared(slot):
            return layer, slot
        return layer.shared_outer, slot - layer.lora_b13.shape[0]

    def _write(self, layer_id: int, slot: int, projections: Mapping[str, ProjectionLora]) -> None:
        """Fill a layer of a slot: what the adapter has, and zeros everywhere else."""
        for name in PROJECTIONS if self.gated else PROJECTIONS[1:]:
            a, b = self._targets(layer_id, name, slot)
            rank = 0
            if name in projections:
                lora = projections[name]
                rank = lora.rank
                copy_factor(a[:, :rank], lora.a)
                copy_factor(b[..., :rank], lora.b, lora.scaling)
            a[:, rank:].zero_()
            b[..., rank:].zero_()

    def _targets(self, layer_id: int, projection: str, slot: int) -> tuple[Tensor, Tensor]:
        """The parts of a slot that hold A [E or 1, R, in] and B [E or 1, out, R] of a projection."""
        layer, slot = self._part(layer_id, slot)
        if projection == "down":
            return layer.lora_a2[slot], layer.lora_b2[slot]
        half = 1 if self.gated and projection == "up" else 0
        a = layer.lora_a13[slot, :, half * self.max_rank : (half + 1) * self.max_rank]
        if self.interleaved:
            return a, layer.lora_b13[slot, :, half::2]
        return a, layer.lora_b13[slot, :, half * self.intermediate_size : (half + 1) * self.intermediate_size]


def _static(tensor: Tensor) -> Tensor:
    """Tells torch.compile's CUDA graphs that it never moves: they would copy the whole pool into each replay otherwise."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
