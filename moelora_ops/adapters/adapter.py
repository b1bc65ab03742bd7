"""The canonical adapter: what every file format is turned into, and what `LoraPool.load` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .geometry import MoeGeometry

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class ProjectionLora:
    """One projection of one layer, all experts: dW[e] = scaling[e] * b[e] @ a[e], in natural (out, in) orientation.

    A leading dimension of 1 is shared by all experts. Experts without an adapter are zeros; experts of smaller rank are padded
    with zeros to the largest. The factors may be views: `LoraPool.load` reads them in pieces.
    """

    a: Tensor  # [E or 1, r, in]
    b: Tensor  # [E or 1, out, r]
    scaling: Tensor  # [E or 1] fp32

    @property
    def rank(self) -> int:
        """The rank r, largest over the experts."""
        return self.a.shape[1]

    def is_shared(self, projection: str) -> bool:
        """Whether the side of the projection that faces H, A of "gate" and "up" or B of "down", is one for all experts."""
        return len(self.b) == len(self.scaling) == 1 if projection == "down" else len(self.a) == 1

    def delta_weight(self, num_experts: int) -> Tensor:
        """The dense change of the weights, scaling included: (E, out, in) fp32, computed in fp64 and rounded once."""
        delta = self.scaling.double()[:, None, None] * (self.b.double() @ self.a.double())
        return delta.float().expand(num_experts, -1, -1).contiguous()


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter for the routed experts of a model, on the CPU, in our names.

    Attributes:
        name: what to call it in messages.
        geometry: of the base model that it was checked against.
        layers: layer id -> projection ("gate", "up", "down"; no "gate" in non-gated models) -> `ProjectionLora`. Layers and
            projections without an adapter are absent.
        unused: names of the file's tensors that are not for routed experts (attention, router, shared experts, ...).
    """

    name: str
    geometry: MoeGeometry
    layers: Mapping[int, Mapping[str, ProjectionLora]]
    unused: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Largest rank over all layers, projections and experts; 0 for an adapter without expert tensors."""
        return max((p.rank for layer in self.layers.values() for p in layer.values()), default=0)

    @property
    def shared_outer(self) -> bool:
        """Whether all experts share A of gate and up, and B (with its scaling) of down: a slot with one copy can hold it."""
        return all(p.is_shared(name) for layer in self.layers.values() for name, p in layer.items())

    def delta_weight(self, layer: int, projection: str) -> Tensor | None:
        """The dense change of one layer's weights, scaling included.

        Args:
            layer: layer id as in the base model.
            projection: "gate", "up", "down", or "gate_up" for both of the first projection, rows [gate; up].

        Returns: (E, out, in) fp32 in natural orientation, or None where the adapter has nothing (always for "gate" and
            "gate_up" of a non-gated model: ask for "up").
        Raises: ValueError for another projection.
        """
        if projection not in (*PROJECTIONS, "gate_up"):
            raise ValueError(f"projection must be gate, up, down or gate_up, got {projection!r}")
        found = self.layers.get(layer, {})
        num_experts = self.geometry.num_experts
        if projection != "gate_up":
            return found[projection].delta_weight(num_experts) if projection in found else None
        if not self.geometry.gated or not {"gate", "up"} & found.keys():
            return None
        nothing = torch.zeros(num_experts, self.geometry.intermediate_size, self.geometry.hidden_size)
        halves = [found[half].delta_weight(num_experts) if half in found else nothing for half in ("gate", "up")]
        return torch.cat(halves, dim=1)
