"""Experts trained by KTransformers, in a file of their own (fused_expert_lora.safetensors).

    layers.{N}.experts.{gate,up,down}_lora_{a,b}        (E, r, in), (E, out, r); the scaling alpha / r is not folded in

Attention and router are in adapter_model.safetensors beside it, where there are any.
"""

from __future__ import annotations

from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import layer_of, pattern
from .pairs import Piece, Reading, assemble

NAME = "KTransformers"
_NAME = pattern("experts", r"\.(?P<projection>gate|up|down)_lora_(?P<half>[ab])")


def matches(name: str) -> bool:
    """Whether a tensor's name has this format."""
    return _NAME.fullmatch(name) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    pieces = []
    for name in names:
        match = _NAME.fullmatch(name)
        assert match is not None
        path = f"{match['path']}.{match['projection']}_proj"
        half = match["half"].upper()
        pieces.append(Piece(name, path, layer_of(match, geometry), match["projection"], half, None))
    layers = assemble(pieces, tensors, config, geometry)
    return Reading(layers, f"{NAME}, all experts in one tensor", "names; shapes fit the base and the ranks of the config")
