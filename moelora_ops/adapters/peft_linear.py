"""PEFT adapters on per-expert `nn.Linear` modules (transformers v4 models, and the exporters that write the same names).

    base_model.model.model.layers.{N}.mlp.experts.{e}.{gate,up,down}_proj.lora_{A,B}.weight
    base_model.model.model.layers.{N}.block_sparse_moe.experts.{e}.{w1,w3,w2}.lora_{A,B}.weight        w1 gate, w3 up, w2 down

A is (r, in), B is (out, r). Experts, projections and layers may be absent and ranks may differ between them; the names say what
is there (PEFT's `layers_to_transform` picks experts instead of layers here).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import AdapterError
from .adapter import ProjectionLora
from .config import AdapterConfig
from .geometry import MoeGeometry
from .names import LAYER_EXPERTS, check_shape, layer_of

_NAME = re.compile(
    LAYER_EXPERTS
    + r"\.(?P<expert>[0-9]{1,9})\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\.lora_(?P<half>[AB])\.weight"
)
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

_Pair = dict[str, tuple[str, Tensor]]  # "A", "B" -> name, tensor


def matches(name: str) -> bool:
    """Whether a tensor's name has this format."""
    return _NAME.fullmatch(name) is not None


def read(tensors: Mapping[str, Tensor], config: AdapterConfig, geometry: MoeGeometry) -> dict[int, dict[str, ProjectionLora]]:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    found: dict[int, dict[str, dict[int, tuple[str, _Pair]]]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        expert = int(match["expert"])
        if expert >= geometry.num_experts:
            raise AdapterError(f"{name}: expert must be < num_experts = {geometry.num_experts}, got {expert}")
        experts = found.setdefault(layer_of(match, geometry), {}).setdefault(_PROJECTIONS[match["projection"]], {})
        path = f"{match['path']}.{expert}.{match['projection']}"
        pair = experts.setdefault(expert, (path, {}))[1]
        if match["half"] in pair:
            raise AdapterError(
                f"{name}: one lora_{match['half']} per expert and projection expected, got also {pair[match['half']][0]}"
            )
        pair[match["half"]] = (name, tensor)
    return {
        layer: {projection: _stack(projection, experts, config, geometry) for projection, experts in projections.items()}
        for layer, projections in found.items()
    }


def _stack(
    projection: str, experts: Mapping[int, tuple[str, _Pair]], config: AdapterConfig, geometry: MoeGeometry
) -> ProjectionLora:
    """All experts of a projection; those without a pair stay zero."""
    size_in, size_out = geometry.sizes(projection)
    for path, pair in experts.values():
        if len(pair) < 2:
            raise AdapterError(f"{path} must have lora_A and lora_B, got only {next(iter(pair.values()))[0]}")
        check_shape(*pair["A"], ("r of the config", config.rank(path)), ("in", size_in))
        check_shape(*pair["B"], ("out", size_out), ("r of the config", config.rank(path)))
    largest = max(config.rank(path) for path, _ in experts.values())
    dtype = functools.reduce(torch.promote_types, (t.dtype for _, pair in experts.values() for _, t in pair.values()))
    a = torch.zeros(geometry.num_experts, largest, size_in, dtype=dtype)
    b = torch.zeros(geometry.num_experts, size_out, largest, dtype=dtype)
    scaling = torch.zeros(geometry.num_experts)
    for expert, (path, pair) in experts.items():
        rank = config.rank(path)
        a[expert, :rank], b[expert, :, :rank], scaling[expert] = pair["A"][1], pair["B"][1], config.scaling(path)
    return ProjectionLora(a, b, scaling)
