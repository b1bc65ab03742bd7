"""Experts trained by KTransformers, in a file of their own (fused_expert_lora.safetensors).

    layers.{N}.experts.{gate,up,down}_lora_{a,b}        (E, r, in), (E, out, r); the scaling alpha / r is not folded in

Attention and router are in adapter_model.safetensors beside it, where there are any.
"""

from __future__ import annotations

from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import Finder, match, pattern
from .pairs import Piece, Reading, assemble

NAME = "KTransformers"
_NAME = pattern("experts", r"\.(?P<projection>gate|up|down)_lora_(?P<half>[ab])")


def matches(rest: str) -> bool:
    """Whether the rest of a tensor's name, after `layers.N.`, has this format."""
    return match((_NAME,), rest) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    pieces, find = [], Finder((_NAME,), geometry)
    for name in names:
        path, layer, parts = find(name)
        projection = str(parts["projection"])
        pieces.append(Piece(name, f"{path}.{projection}_proj", layer, projection, str(parts["half"]).upper(), None))
    layers = assemble(pieces, tensors, config, geometry)
    return Reading(layers, f"{NAME}, all experts in one tensor", "names; shapes fit the base and the ranks of the config")
