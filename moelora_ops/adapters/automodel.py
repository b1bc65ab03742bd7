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
from .names import clean, layer_of, pattern
from .pairs import TRANSPOSED, Piece, Reading, assemble

NAME = "NeMo Automodel"
_NAME = pattern("experts", r"\.lora_(?P<projection>gate_and_up|down)_(?P<half>[AB])")


def matches(name: str) -> bool:
    """Whether a tensor's name has this format."""
    return _NAME.fullmatch(clean(name)) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    pieces = []
    for name in names:
        match = _NAME.fullmatch(clean(name))
        assert match is not None
        projection = "down" if match["projection"] == "down" else "gate_up" if geometry.gated else "up"
        path = f"{match['path']}.{projection}_proj"
        pieces.append(Piece(name, path, layer_of(match, geometry), projection, match["half"], None, TRANSPOSED))
    layers = assemble(pieces, tensors, config, geometry)
    return Reading(layers, f"{NAME}, all experts in one tensor", "names; shapes fit the base and the ranks of the config")
