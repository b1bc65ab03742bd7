"""Slots for adapters at fixed device addresses: what captured and compiled code reads from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import COMPUTE_DTYPES, check_positive, short
from ..errors import AdapterError
from .adapter import LoraAdapter, ProjectionLora
from .geometry import MoeGeometry

# Of an adapter: other dtypes need a meaning that a pair does not carry (int8 a scale, complex a real part).
FACTOR_DTYPES = (*COMPUTE_DTYPES, torch.float64)


@dataclass(frozen=True)
class PoolLayer:
    """The pool's tensors of one layer, in the layout of `fused_experts_lora`. L slots, S slices (2 gated, 1 not), R rank.

    `lora_ranks` and `adapter_enabled` are shared by all layers of the pool.
    """

    lora_a13: Tensor  # [L, E, S * R, H]: gate's A in rows 0..R, up's in rows R..2R
    lora_b13: Tensor  # [L, E, S * I, R]: rows [gate | up], or alternating in an interleaved pool
    lora_a2: Tensor  # [L, E, R, I]
    lora_b2: Tensor  # [L, E, H, R]
    lora_ranks: Tensor  # [L] int32
    adapter_enabled: Tensor  # [L] int32
    interleaved: bool = False  # order of the rows of lora_b13


class LoraPool:
    """Adapter slots for all MoE layers of a model.

    The tensors are allocated once and never move: `load` and `unload` copy in place, so captured CUDA graphs and compiled code
    see the new adapter at their next run. Work of a slot follows its own rank, and a slot that is empty or disabled is "no
    adapter". Loads and runs belong on the same stream: a load between two graph replays is then seen whole by the second.

    Args:
        layers: number of MoE layers (ids 0, 1, ...) or their ids in the base model.
        max_loras: slots L. max_rank: rank R of the slots; an adapter's own rank may be smaller.
        num_experts, hidden_size, intermediate_size: E, H, I of the experts.
        gated: gate and up projection (S = 2), or up alone. interleaved: rows of lora_b13 alternate gate, up, like w13.
        dtype: fp32, bf16 or fp16. device: where the tensors live.

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
        self.max_loras, self.max_rank = max_loras, max_rank
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.gated, self.interleaved, self.dtype = gated, interleaved, dtype
        slices = 2 if gated else 1

        def fixed(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            with torch.inference_mode(False):  # engines build models inside it: its tensors could not be loaded outside
                tensor = torch.zeros(shape, dtype=dtype, device=device)
            # Tells torch.compile's CUDA graphs that it never moves: they would copy the whole pool into each replay otherwise.
            torch._dynamo.mark_static_address(tensor, guard=False)
            return tensor

        self.lora_ranks: Tensor = fixed(max_loras, dtype=torch.int32)
        self.adapter_enabled: Tensor = fixed(max_loras, dtype=torch.int32)
        self._layers = {
            layer_id: PoolLayer(
                lora_a13=fixed(max_loras, num_experts, slices * max_rank, hidden_size),
                lora_b13=fixed(max_loras, num_experts, slices * intermediate_size, max_rank),
                lora_a2=fixed(max_loras, num_experts, max_rank, intermediate_size),
                lora_b2=fixed(max_loras, num_experts, hidden_size, max_rank),
                lora_ranks=self.lora_ranks,
                adapter_enabled=self.adapter_enabled,
                interleaved=interleaved,
            )
            for layer_id in self.layer_ids
        }
        self._ranks: list[int | None] = [
            None
        ] * max_loras  # None: empty. Host copies, so that asking never waits for the device.
        self._enabled = [False] * max_loras

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> LoraPool:
        """A pool for the MoE layers of a transformers config, its dict, or the path of a config.json."""
        geometry = config if isinstance(config, MoeGeometry) else MoeGeometry.from_config(config)
        return cls(
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
        )

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

    @torch.no_grad()
    def load(self, adapter: LoraAdapter, slot: int) -> None:
        """Copy an adapter into a slot, in place, and enable it; whatever the slot held is replaced.

        The scaling is multiplied into B in fp32 and the product cast once. Everything is checked before anything is written: a
        load that raises here leaves the slot bitwise as it was.

        Raises: ValueError for a slot out of range; AdapterError where the adapter does not fit the pool or its values do not
            fit the pool's dtype.
        """
        self._check_slot(slot)
        if not isinstance(adapter, LoraAdapter):
            raise TypeError(f"adapter must be a LoraAdapter, got {type(adapter).__name__}")
        self._check_fits(adapter)
        factors = {
            (layer_id, projection): self._factors(f"{adapter.name}: layer {layer_id} {projection}", projection, lora)
            for layer_id, projections in adapter.layers.items()
            for projection, lora in projections.items()
        }
        self._clear(slot)  # off while it is half written, should another stream look
        for (layer_id, projection), (a, b) in factors.items():
            for target, source in zip(self._targets(layer_id, projection, slot, a.shape[1]), (a, b)):
                target.copy_(source)
        self.lora_ranks[slot].fill_(adapter.rank)
        self._ranks[slot] = adapter.rank
        self.enable(slot)

    def unload(self, slot: int) -> None:
        """Empty a slot: disabled, rank 0, zeros."""
        self._clear(self._check_slot(slot))

    def _clear(self, slot: int) -> None:
        self.disable(slot)
        self.lora_ranks[slot].fill_(0)
        self._ranks[slot] = None
        for layer in self._layers.values():
            for tensor in (layer.lora_a13, layer.lora_b13, layer.lora_a2, layer.lora_b2):
                tensor[slot].zero_()

    def _check_slot(self, slot: int) -> int:
        if isinstance(slot, bool) or not isinstance(slot, int):
            raise TypeError(f"slot must be an int, got {type(slot).__name__}")
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot must be in [0, {self.max_loras}), got {slot}")
        return slot

    def _check_fits(self, adapter: LoraAdapter) -> None:
        for name in ("num_experts", "hidden_size", "intermediate_size", "gated"):
            want, got = getattr(self, name), getattr(adapter.geometry, name)
            if want != got:
                raise AdapterError(f"{adapter.name}: {name} must be {want} as in the pool, got {got}")
        for layer_id, projections in adapter.layers.items():
            if layer_id not in self._layers:
                raise AdapterError(f"{adapter.name}: layers must be among the pool's {self.layer_ids}, got {layer_id}")
            self._check_layer(f"{adapter.name}: layer {layer_id}", projections)

    def _check_layer(self, where: str, projections: Mapping[str, ProjectionLora]) -> None:
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}  # in, out
        if not self.gated:
            del sizes["gate"]
        for name, lora in projections.items():
            if name not in sizes:
                raise AdapterError(f"{where} projection must be one of {', '.join(sizes)}, got {name!r}")
            for part in ("a", "b", "scaling"):
                value = getattr(lora, part, None)
                if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dtype not in FACTOR_DTYPES:
                    got = f"{value.layout} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                    raise AdapterError(f"{where} {name}.{part} must be a dense {short(FACTOR_DTYPES)} tensor, got {got}")
            if lora.a.dim() != 3:
                raise AdapterError(f"{where} {name}.a must be 3-dimensional [E or 1, r, in], got shape {tuple(lora.a.shape)}")
            if lora.rank > self.max_rank:
                raise AdapterError(f"{where} {name} rank must be <= max_rank = {self.max_rank} of the pool, got {lora.rank}")
            size_in, size_out = sizes[name]
            for part, tensor, shape in (
                ("a", lora.a, (lora.rank, size_in)),
                ("b", lora.b, (size_out, lora.rank)),
                ("scaling", lora.scaling, ()),
            ):
                if tensor.dim() < 1 or tensor.shape[0] not in (1, self.num_experts) or tuple(tensor.shape[1:]) != shape:
                    want = ", ".join(map(str, (f"{self.num_experts} or 1", *shape)))
                    raise AdapterError(f"{where} {name}.{part} must have shape [{want}], got {tuple(tensor.shape)}")

    def _factors(self, where: str, projection: str, lora: ProjectionLora) -> tuple[Tensor, Tensor]:
        """A and scaling * B in the pool's dtype, on the adapter's device."""
        a = lora.a.to(self.dtype, copy=True)  # the slot is cleared before it is written: `a` may be a view of it
        b = (lora.b.float() * lora.scaling.float()[:, None, None]).to(self.dtype)
        for name, tensor in (("A", a), ("scaling * B", b)):
            if not torch.isfinite(tensor).all():
                raise AdapterError(f"{where} {name} must be finite in {short([self.dtype])}, got infinite or NaN values")
        return a, b

    def _targets(self, layer_id: int, projection: str, slot: int, rank: int) -> tuple[Tensor, Tensor]:
        """The parts of a slot that hold A [E, rank, in] and B [E, out, rank] of a projection."""
        layer = self._layers[layer_id]
        if projection == "down":
            return layer.lora_a2[slot, :, :rank], layer.lora_b2[slot, :, :, :rank]
        half = 1 if self.gated and projection == "up" else 0
        a = layer.lora_a13[slot, :, half * self.max_rank : half * self.max_rank + rank]
        if self.interleaved:
            return a, layer.lora_b13[slot, :, half::2, :rank]
        return a, layer.lora_b13[slot, :, half * self.intermediate_size : (half + 1) * self.intermediate_size, :rank]
