"""NeMo Automodel's own names for grouped experts.

    base_model.model.model.layers.{N}.mlp.experts.lora_gate_and_up_{A,B}        (E, in, r), (E, r, 2 I or, not gated, I)
    base_model.model.model.layers.{N}.mlp.experts.lora_down_{A,B}               (E, in, r), (E, r, out)

It computes x A B, so both are transposed against PEFT's. Columns of gate and up are those of the base's own parameter: halves,
alternating in gpt-oss. The scaling is alpha divided by the rank of the tensors, which `moe_rank_scaling` makes smaller than r.
"""

from __future__ import annotations

from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import Finder, match, pattern
from .pairs import TRANSPOSED, Piece, Reading, assemble

NAME = "NeMo Automodel"
_NAME = pattern("experts", r"\.lora_(?P<projection>gate_and_up|down)_(?P<half>[AB])")


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
        projection = "down" if parts["projection"] == "down" else "gate_up" if geometry.gated else "up"
        pieces.append(Piece(name, f"{path}.{projection}_proj", layer, projection, str(parts["half"]), None, TRANSPOSED))
    layers = assemble(pieces, tensors, config, geometry)
    return Reading(layers, f"{NAME}, all experts in one tensor", "names; shapes fit the base and the ranks of the config")
