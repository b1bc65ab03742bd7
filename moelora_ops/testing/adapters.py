"""Random canonical adapters, without files."""

from __future__ import annotations

from typing import Sequence

import torch

from ..adapters import LoraAdapter, MoeGeometry, ProjectionLora


def random_adapter(
    geometry: MoeGeometry,
    rank: int,
    *,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    projections: Sequence[str] = ("gate", "up", "down"),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    name: str = "random",
) -> LoraAdapter:
    """An adapter of one rank whose delta is about as large as a base of unit gain; each projection has an A of its own.

    The scaling differs between experts and is folded into nothing yet.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def projection(size_in: int, size_out: int) -> ProjectionLora:
        a = torch.randn(geometry.num_experts, rank, size_in, generator=generator, device=device) * size_in**-0.5
        b = torch.randn(geometry.num_experts, size_out, rank, generator=generator, device=device) * rank**-0.5
        scaling = torch.rand(geometry.num_experts, generator=generator, device=device) + 0.5
        return ProjectionLora(a.to(dtype), b.to(dtype), scaling)

    found = {
        layer: {p: projection(*geometry.sizes(p)) for p in projections if geometry.gated or p != "gate"}
        for layer in (geometry.moe_layers if layers is None else layers)
    }
    return LoraAdapter(name, geometry, found)
