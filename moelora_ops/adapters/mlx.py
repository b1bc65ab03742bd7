"""Adapters of mlx-lm (adapters.safetensors, adapter_config.json with `lora_parameters`).

    model.layers.{N}.mlp.switch_mlp.{gate,up,down}_proj.lora_{a,b}        (E, r, in), (E, out, r)

Older versions write lora_a as (E * r, in), row e * r + j. gpt-oss and Llama 4 have `experts` instead of `switch_mlp`,
Nemotron-H `fc1` and `fc2`. The scaling is `lora_parameters.scale` itself. (Plain linear layers are (in, r), (r, out) there.)
"""

from __future__ import annotations

from ..errors import AdapterError
from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import Finder, match, pattern
from .pairs import FLAT, PLAIN, PROJECTIONS, Piece, Reading, assemble

NAME = "MLX"
_NAME = pattern(r"(?:switch_mlp|experts)\.(?P<projection>gate_proj|up_proj|down_proj|fc1|fc2)", r"\.lora_(?P<half>[ab])")
_PROJECTIONS = PROJECTIONS | {"fc1": "up", "fc2": "down"}


def matches(rest: str) -> bool:
    """Whether the rest of a tensor's name, after `layers.N.`, has this format."""
    return match((_NAME,), rest) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor or field, what was expected and what came.
    """
    if config.factor is None:
        raise AdapterError(f"adapter_config must have mlx-lm's lora_parameters.scale for {names[0]}, got another tool's fields")
    pieces, find = [], Finder((_NAME,), geometry)
    for name in names:
        path, layer, parts = find(name)
        word, half = str(parts["projection"]), str(parts["half"]).upper()
        if word.startswith("fc") and geometry.gated:
            raise AdapterError(f"{name}: projection must be gate_proj, up_proj or down_proj of a gated base, got fc1 or fc2")
        layout = FLAT if half == "A" and len(tensors.shape(name)) == 2 else PLAIN
        pieces.append(Piece(name, path, layer, _PROJECTIONS[word], half, None, layout))
    layers = assemble(pieces, tensors, config, geometry)
    return Reading(layers, f"{NAME}, all experts in one tensor", "names; shapes fit the base and the rank of the config")
