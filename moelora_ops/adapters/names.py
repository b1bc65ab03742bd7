"""Names of tensors: which are for routed experts, of which layer."""

from __future__ import annotations

import re

from torch import Tensor

from ..errors import AdapterError
from .geometry import MoeGeometry

# Up to and including `experts`. Only prefixes of the decoder layers: `mtp.layers.0` or a vision tower's is not layer 0.
LAYER_EXPERTS = (
    r"(?:base_model\.model\.)?"
    r"(?P<path>(?:(?:model|language_model|text_model|backbone)\.)*layers\.(?P<layer>[0-9]{1,9})\."
    r"(?:(?:mlp|block_sparse_moe|feed_forward|mixer|moe)\.)?experts)"
)
# Modules under which other tools keep routed experts without calling them so.
_EXPERT_MODULES = ("switch_mlp", "input_linear", "output_linear", "moe_h_to_4h", "moe_4h_to_h", "moe_gate")


def is_for_experts(name: str) -> bool:
    """Whether a tensor may belong to routed experts: then it is understood or refused, never skipped."""
    parts = re.split(r"[./]", name.lower())
    return any(("expert" in part and "share" not in part) or part in _EXPERT_MODULES for part in parts)


def layer_of(match: re.Match[str], geometry: MoeGeometry) -> int:
    """The layer of a matched name, which must be one with routed experts."""
    layer = int(match["layer"])
    if layer not in geometry.moe_layers:
        raise AdapterError(f"{match.string}: layer must be one with routed experts, {geometry.moe_layers}, got {layer}")
    return layer


def check_shape(name: str, tensor: Tensor, *sizes: tuple[str, int]) -> None:
    """The shape of a tensor against named sizes."""
    if tuple(tensor.shape) != tuple(size for _, size in sizes):
        want = ", ".join(f"{letter} = {size}" for letter, size in sizes)
        raise AdapterError(f"{name} must have shape [{want}], got {tuple(tensor.shape)}")
