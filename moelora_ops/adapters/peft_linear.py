"""Adapters on separate projections, under PEFT's names.

    ...layers.{N}.mlp.experts.{e}.{gate,up,down}_proj.lora_{A,B}.weight             (r, in), (out, r)
    ...layers.{N}.block_sparse_moe.experts.{e}.{w1,w3,w2}.lora_{A,B}.weight         w1 gate, w3 up, w2 down
    ...layers.{N}.mlp.experts.{gate_up,down}_projs.{e}.lora_{A,B}.weight            Unsloth, gpt-oss in 4 bits
    ...layers.{N}.mlp.experts.{gate,up,down,gate_up}_proj.lora_{A,B}.weight         (E or 1, r, in), (E or 1, out, r)

The first is PEFT's own on models of transformers v4; NeMo Automodel, Megatron-Bridge, prime-rl and others export it. The last
has all experts in one tensor, or one tensor for all of them (SGLang, Megatron-Bridge, Tinker); Megatron-Bridge also shares one
side and keeps the other per expert. Experts, projections and layers may be absent and ranks may differ between them; the names
say what is there (PEFT's `layers_to_transform` picks experts instead of layers here).

A gate_up has one A for gate and up, or one above the other; the rows of B are [gate; up], or those of the base's own parameter.
"""

from __future__ import annotations

from ..errors import AdapterError
from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import Finder, match, pattern
from .pairs import PROJECTIONS, Piece, Reading, assemble

NAME = "one pair for each projection"
_PROJECTION = r"(?P<projection>(?:gate|up|down|gate_up)_proj|w[123])"
_NAMES = (
    pattern(rf"experts\.(?P<expert>[0-9]{{1,9}})\.{_PROJECTION}"),
    pattern(r"experts\.(?P<projection>(?:gate|up|down|gate_up)_proj)s\.(?P<expert>[0-9]{1,9})"),
    pattern(rf"experts\.{_PROJECTION}"),
)


def matches(rest: str) -> bool:
    """Whether the rest of a tensor's name, after `layers.N.`, has this format."""
    return match(_NAMES, rest) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor, what was expected and what came.
    """
    pieces, kinds, find = [], set(), Finder(_NAMES, geometry)
    for name in names:
        path, layer, parts = find(name)
        expert, projection = parts.get("expert"), PROJECTIONS[str(parts["projection"])]
        if expert is None and projection == "gate_up" and geometry.interleaved:
            raise AdapterError(
                f"{name} must have rows in a known order, got a base whose gate and up alternate: save them apart"
            )
        kinds.add("all experts in one tensor" if expert is None else "one for each expert")
        pieces.append(Piece(name, path, layer, projection, str(parts["half"]), None if expert is None else int(expert)))
    return Reading(
        assemble(pieces, tensors, config, geometry),
        f"{NAME}, {' and '.join(sorted(kinds))}",
        "projections and experts by name; shapes fit the base and the ranks of the config",
    )
