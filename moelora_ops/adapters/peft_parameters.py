"""PEFT adapters on fused 3-D expert parameters (`target_parameters`, transformers v5 models).

    base_model.model.model.layers.{N}.mlp.experts.base_layer.lora_{A,B}.weight       first registered parameter (gate_up_proj)
    base_model.model.model.layers.{N}.mlp.experts.lora_{A,B}.weight                  the last, or the only one: ask the config

With E experts of rank r, row e * r + j of lora_A and column j * E + e of lora_B belong to component j of expert e. *Natural*
orientation (PEFT >= 0.19.1 on [E, out, in] storage): lora_A (E * r, in), lora_B (out, r * E). *Reversed*: lora_A (E * r, out),
lora_B (in, r * E), and the change is the transposed product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import AdapterError
from .adapter import ProjectionLora
from .config import AdapterConfig
from .geometry import MoeGeometry
from .names import LAYER_EXPERTS, layer_of

_NAME = re.compile(LAYER_EXPERTS + r"(?P<wrappers>(?:\.base_layer)*)\.lora_(?P<half>[AB])\.weight")
_CHANGED_STORAGE = ("qwen3_vl_moe", "qwen3_vl_moe_text")  # [E, in, out] in transformers v4, [E, out, in] in v5


@dataclass(frozen=True)
class _Factors:
    """lora_A and lora_B of one parameter of one layer."""

    layer: int
    parameter: str  # gate_up_proj, up_proj or down_proj
    path: str  # of the parameter in the base model
    name: str  # of lora_A
    a: Tensor
    b: Tensor


def matches(name: str) -> bool:
    """Whether a tensor's name has this format."""
    return _NAME.fullmatch(name) is not None


def read(tensors: Mapping[str, Tensor], config: AdapterConfig, geometry: MoeGeometry) -> dict[int, dict[str, ProjectionLora]]:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor or field, what was expected and what came.
    """
    factors = _collect(tensors, config, geometry)
    proven = {natural for f in factors if (natural := _natural_by_shape(f, config, geometry)) is not None}
    if len(proven) > 1:
        raise AdapterError("lora_A and lora_B of all expert parameters must have one orientation, got both in one file")
    natural = proven.pop() if proven else _natural_by_version(factors[0], config, geometry)
    layers: dict[int, dict[str, ProjectionLora]] = {}
    for f in factors:
        a, b = _unpack(f, config, geometry, natural)
        layers.setdefault(f.layer, {}).update(_projections(f, a, b, config, geometry))
    return layers


def _collect(tensors: Mapping[str, Tensor], config: AdapterConfig, geometry: MoeGeometry) -> list[_Factors]:
    """Which tensors belong to which parameter: the wrappers nest in the order of registration, the first one innermost."""
    found: dict[str, dict[tuple[int, str], tuple[str, Tensor]]] = {}
    layer_ids: dict[str, int] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        layer_ids[match["path"]] = layer_of(match, geometry)
        part = found.setdefault(match["path"], {}).setdefault(
            (match["wrappers"].count("base_layer"), match["half"]), (name, tensor)
        )
        if part[0] != name:
            raise AdapterError(f"{name}: one such tensor per layer expected, got also {part[0]}")
    result = []
    for path, parts in found.items():
        parameters = _targeted(path, config, geometry)
        wanted = {(depth, half) for depth in range(len(parameters)) for half in "AB"}
        if parts.keys() != wanted:
            names = sorted(name for name, _ in parts.values())
            raise AdapterError(
                f"{path} must have lora_A and lora_B for each parameter of adapter_config field target_parameters, "
                f"{' and '.join(parameters) or 'none'}, got {', '.join(names)}"
            )
        for depth, parameter in enumerate(reversed(parameters)):
            (name, a), (_, b) = parts[depth, "A"], parts[depth, "B"]
            result.append(_Factors(layer_ids[path], parameter, f"{path}.{parameter}", name, a, b))
    if len(set(layer_ids.values())) < len(layer_ids):
        raise AdapterError(f"each layer must have one set of experts, got {', '.join(sorted(layer_ids))}")
    return result


def _targeted(path: str, config: AdapterConfig, geometry: MoeGeometry) -> list[str]:
    """The parameters of `path` that target_parameters names, in the order of their registration in the module."""

    def is_target(parameter: str) -> bool:
        full = f"{path}.{parameter}"
        return any(full == target or full.endswith(f".{target}") for target in config.target_parameters)

    parameters = ["gate_up_proj" if geometry.gated else "up_proj", "down_proj"]
    for parameter in parameters:
        if is_target(f"{parameter}_bias"):
            raise AdapterError(
                f"adapter_config field target_parameters must name weights of experts, got {path}.{parameter}_bias"
            )
    return [p for p in parameters if is_target(p)]


def _sizes(f: _Factors, geometry: MoeGeometry) -> tuple[int, int]:
    size_in, size_out = geometry.sizes("down" if f.parameter == "down_proj" else "up")
    return size_in, size_out * (2 if f.parameter == "gate_up_proj" else 1)


def _natural_by_shape(f: _Factors, config: AdapterConfig, geometry: MoeGeometry) -> bool | None:
    """True natural, False reversed, None where in == out leaves it open."""
    size_in, size_out = _sizes(f, geometry)
    num_columns = geometry.num_experts * config.rank(f.path)
    natural = (num_columns, size_in), (size_out, num_columns)
    backward = (num_columns, size_out), (size_in, num_columns)
    shapes = tuple(f.a.shape), tuple(f.b.shape)
    if shapes not in (natural, backward):
        raise AdapterError(
            f"{f.name} and its lora_B must have shapes {natural} or, of an older PEFT, {backward} for {f.parameter} with "
            f"{geometry.num_experts} experts of rank {config.rank(f.path)} (adapter_config), got {shapes}"
        )
    return None if natural == backward else shapes == natural


def _natural_by_version(f: _Factors, config: AdapterConfig, geometry: MoeGeometry) -> bool:
    """What the PEFT that wrote the file did for this storage, where no shape tells."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", config.peft_version) if isinstance(config.peft_version, str) else None
    if version is None or geometry.model_type in _CHANGED_STORAGE:
        raise AdapterError(
            f"{f.name} must show its orientation: in and out are both {_sizes(f, geometry)[0]}, and adapter_config field "
            f"peft_version, got {config.peft_version!r}, does not decide for {geometry.model_type or 'this model'}"
        )
    number = tuple(int(part) for part in version.groups())
    if geometry.model_type in ("llama4", "llama4_text"):
        return number < (0, 19, 1)
    if geometry.transposed:
        return number != (0, 19, 0)
    return number >= (0, 19, 1)


def _unpack(f: _Factors, config: AdapterConfig, geometry: MoeGeometry, natural: bool) -> tuple[Tensor, Tensor]:
    """A (E, r, in) and B (E, out, r) in natural orientation."""
    num_experts, rank = geometry.num_experts, config.rank(f.path)
    a = f.a.reshape(num_experts, rank, -1)
    if config.b_packing == "expert_major":
        b = f.b.reshape(-1, num_experts, rank).permute(1, 0, 2)
    else:
        b = f.b.reshape(-1, rank, num_experts).permute(2, 0, 1)
    return (a, b) if natural else (b.transpose(1, 2), a.transpose(1, 2))


def _projections(f: _Factors, a: Tensor, b: Tensor, config: AdapterConfig, geometry: MoeGeometry) -> dict[str, ProjectionLora]:
    """Gate and up apart: each half of the rows of B with its A."""
    scaling = config.scaling(f.path)
    if f.parameter != "gate_up_proj":
        return {f.parameter.removesuffix("_proj"): _projection(a, b, scaling)}
    inner = geometry.intermediate_size
    gate, up = (b[:, 0::2], b[:, 1::2]) if geometry.interleaved else (b[:, :inner], b[:, inner:])
    half = a.shape[1] // 2
    if a.shape[1] % 2 or gate[..., half:].any() or up[..., :half].any():
        return {"gate": _projection(a, gate, scaling), "up": _projection(a, up, scaling)}
    # Exactly block diagonal: two adapters of rank r that PEFT's conversion stacked to one of rank 2r. It doubles alpha as well,
    # which keeps alpha / r but makes rsLoRA's alpha / sqrt(r) too large by sqrt(2).
    if config.use_rslora and a.shape[1] == 2 * config.r and config.alpha(f.path) == 2 * config.lora_alpha:
        scaling /= math.sqrt(2)
    return {
        "gate": _projection(a[:, :half], gate[..., :half], scaling),
        "up": _projection(a[:, half:], up[..., half:], scaling),
    }


def _projection(a: Tensor, b: Tensor, scaling: float) -> ProjectionLora:
    return ProjectionLora(a.contiguous(), b.contiguous(), torch.tensor([scaling], dtype=torch.float32))
