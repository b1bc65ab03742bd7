"""PEFT adapters on fused 3-D expert parameters (`target_parameters`, transformers v5 models).

    base_model.model.model.layers.{N}.mlp.experts.base_layer.lora_{A,B}.weight       first registered parameter (gate_up_proj)
    base_model.model.model.layers.{N}.mlp.experts.lora_{A,B}.weight                  the last, or the only one: ask the config

With E experts of rank r, row e * r + j of lora_A and column j * E + e of lora_B belong to component j of expert e. *Natural*
orientation (PEFT >= 0.19.1 on [E, out, in] storage): lora_A (E * r, in), lora_B (out, r * E). *Reversed*: lora_A (E * r, out),
lora_B (in, r * E), and the change is the transposed product. What proves the orientation: the shapes of a tensor; where in
equals out, those of another projection of the same file; then peft_version, which says what PEFT did for the base's storage.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import AdapterError
from .adapter import ProjectionLora
from .config import AdapterConfig
from .files import TensorFiles
from .geometry import MoeGeometry
from .names import OTHER_BASE, Finder, match, pattern
from .pairs import Layers, Reading

NAME = "PEFT target_parameters"
_NAME = pattern("experts(?P<wrappers>(?:\\.base_layer)*)")
_CHANGED_STORAGE = ("qwen3_vl_moe", "qwen3_vl_moe_text")  # [E, in, out] in transformers v4, [E, out, in] in v5
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(\.?(?:dev|rc|a|b))?")
_UNSETTLED = ((0, 19, 0), (0, 19, 1))  # versions before whose release either may have been done
_NAMED = {True: "natural", False: "reversed"}


@dataclass(frozen=True)
class _Factors:
    """lora_A and lora_B of one parameter of one layer."""

    layer: int
    parameter: str  # gate_up_proj, up_proj or down_proj
    path: str  # of the parameter in the base model
    name_a: str
    name_b: str


def matches(rest: str) -> bool:
    """Whether the rest of a tensor's name, after `layers.N.`, has this format."""
    return match((_NAME,), rest) is not None


def read(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> Reading:
    """Layers of an adapter from its expert tensors, all of which match.

    Raises: AdapterError naming the tensor or field, what was expected and what came.
    """
    factors = _collect(tensors, names, config, geometry)
    natural, proof = _orientation(factors, tensors, config, geometry)
    layers: Layers = {}
    sliced = False
    for f in factors:
        a, b = _unpack(tensors.read(f.name_a), tensors.read(f.name_b), f, config, geometry, natural)
        found = _projections(f, a, b, config, geometry)
        sliced |= f.parameter == "gate_up_proj" and found["gate"].rank < a.shape[1]
        layers.setdefault(f.layer, {}).update(found)
    form = f"{NAME}, {_NAMED[natural]} orientation"
    form += ", lora_B expert by expert (b_packing)" if config.options.b_packing else ""
    form += ", gate and up block diagonal: read as two of half the rank" if sliced else ""
    return Reading(layers, form, proof)


def _collect(tensors: TensorFiles, names: list[str], config: AdapterConfig, geometry: MoeGeometry) -> list[_Factors]:
    """Which tensors belong to which parameter: the wrappers nest in the order of registration, the first one innermost."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    layer_ids: dict[str, int] = {}
    find = Finder((_NAME,), geometry)
    for name in names:
        path, layer, groups = find(name)
        wrappers = str(groups["wrappers"])
        path = path.removesuffix(wrappers)
        layer_ids[path] = layer
        part = found.setdefault(path, {}).setdefault((wrappers.count("base_layer"), str(groups["half"])), name)
        if part != name:
            raise AdapterError(f"{name}: one such tensor per layer expected, got also {part}")
    if len(set(layer_ids.values())) < len(layer_ids):
        raise AdapterError(f"each layer must have one set of experts, got {', '.join(sorted(layer_ids))}")
    result = []
    for path, parts in sorted(found.items(), key=lambda item: layer_ids[item[0]]):
        parameters = _targeted(path, parts, tensors, config, geometry)
        wanted = {(depth, half) for depth in range(len(parameters)) for half in "AB"}
        if parts.keys() != wanted:
            raise AdapterError(
                f"{path} must have lora_A and lora_B for each parameter of adapter_config field target_parameters, "
                f"{' and '.join(parameters) or 'none'}, got {', '.join(sorted(parts.values()))}"
            )
        for depth, parameter in enumerate(reversed(parameters)):
            name_a, name_b = parts[depth, "A"], parts[depth, "B"]
            result.append(_Factors(layer_ids[path], parameter, f"{path}.{parameter}", name_a, name_b))
    return result


def _targeted(
    path: str, parts: dict[tuple[int, str], str], tensors: TensorFiles, config: AdapterConfig, geometry: MoeGeometry
) -> list[str]:
    """The parameters of `path` that the tensors are for, in the order of their registration in the module."""

    def is_target(parameter: str) -> bool:
        full = f"{path}.{parameter}"
        below = full[full.index("layers.") :]  # exporters may write what is above the layers differently here
        return any(full == t or full.endswith(f".{t}") or t.endswith(f".{below}") for t in config.target_parameters)

    parameters = ["gate_up_proj" if geometry.gated else "up_proj", "down_proj"]
    for parameter in parameters:
        if is_target(f"{parameter}_bias"):
            raise AdapterError(
                f"adapter_config field target_parameters must name weights of experts, got {path}.{parameter}_bias"
            )
    if config.target_parameters:
        return [p for p in parameters if is_target(p)]
    if parts.keys() != {(0, "A"), (0, "B")}:
        return parameters if (1, "A") in parts else []
    # An exporter left the field out, and one wrapper has the same name for each parameter: the shapes may tell.
    candidates = [_Factors(0, p, f"{path}.{p}", parts[0, "A"], parts[0, "B"]) for p in parameters]
    fitting = [f.parameter for f in candidates if _shapes(f, tensors) in _expected(f, config, geometry)]
    if len(fitting) > 1:
        raise AdapterError(
            f"adapter_config field target_parameters must name the parameter of {parts[0, 'A']}, got none, and its shape fits "
            f"{' and '.join(fitting)}"
        )
    return fitting


def _sizes(f: _Factors, geometry: MoeGeometry) -> tuple[int, int]:
    size_in, size_out = geometry.sizes("down" if f.parameter == "down_proj" else "up")
    return size_in, size_out * (2 if f.parameter == "gate_up_proj" else 1)


_Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def _shapes(f: _Factors, tensors: TensorFiles) -> _Shapes:
    return tensors.shape(f.name_a), tensors.shape(f.name_b)


def _expected(f: _Factors, config: AdapterConfig, geometry: MoeGeometry) -> tuple[_Shapes, _Shapes]:
    """Shapes of lora_A and lora_B in natural and in reversed orientation."""
    size_in, size_out = _sizes(f, geometry)
    num_columns = geometry.num_experts * config.rank(f.path)
    natural = (num_columns, size_in), (size_out, num_columns)
    return natural, ((num_columns, size_out), (size_in, num_columns))


def _orientation(
    factors: list[_Factors], tensors: TensorFiles, config: AdapterConfig, geometry: MoeGeometry
) -> tuple[bool, str]:
    """True for natural, False for reversed, and what proves it."""
    proven: dict[bool, str] = {}
    for f in factors:
        shapes, (natural, backward) = _shapes(f, tensors), _expected(f, config, geometry)
        if shapes not in (natural, backward):
            raise AdapterError(
                f"{f.name_a} and its lora_B must have shapes {natural} or, of an older PEFT, {backward} for {f.parameter} with "
                f"{geometry.num_experts} experts of rank {config.rank(f.path)} (adapter_config), got {shapes}{OTHER_BASE}"
            )
        if natural != backward:
            proven.setdefault(shapes == natural, f"the shape of {f.name_a}, {shapes[0]}")
    if len(proven) > 1:
        raise AdapterError(
            "lora_A and lora_B of all expert parameters must have one orientation, got both in one file: natural by "
            f"{proven[True]}, reversed by {proven[False]}"
        )
    asked = None if config.options.orientation is None else config.options.orientation == "natural"
    if proven:
        found, proof = next(iter(proven.items()))
        if asked is not None and asked != found:
            raise AdapterError(f"orientation must be {_NAMED[found]} or None for this file, got the other: see {proof}")
        return found, f"{_NAMED[found]} orientation by {proof}"
    if asked is not None:
        return asked, f"{_NAMED[asked]} orientation by the caller's option; in and out are equal"
    found = _by_version(factors[0], config, geometry)
    return found, f"{_NAMED[found]} orientation by peft_version {config.peft_version} for this base; in and out are equal"


def _by_version(f: _Factors, config: AdapterConfig, geometry: MoeGeometry) -> bool:
    """What the PEFT that wrote the file did for this storage, where no shape tells."""
    version = _VERSION.match(config.peft_version) if isinstance(config.peft_version, str) else None
    number = tuple(int(part) for part in version.groups()[:3]) if version else ()
    if (
        version is None
        or (version[4] and number in _UNSETTLED)
        or not geometry.model_type
        or geometry.model_type in _CHANGED_STORAGE
    ):
        raise AdapterError(
            f"{f.name_a} must show its orientation: in and out are both {_sizes(f, geometry)[0]}, and adapter_config field "
            f"peft_version, got {config.peft_version!r:.40}, does not decide for "
            f'{geometry.model_type or "a base without model_type"}: the option orientation="natural" or "reversed" does'
        )
    if geometry.model_type in ("llama4", "llama4_text"):
        return number < (0, 19, 1)
    if geometry.transposed:
        return number != (0, 19, 0)
    return number >= (0, 19, 1)


def _unpack(
    a: Tensor, b: Tensor, f: _Factors, config: AdapterConfig, geometry: MoeGeometry, natural: bool
) -> tuple[Tensor, Tensor]:
    """Views of the tensors: A (E, r, in) and B (E, out, r) in natural orientation."""
    num_experts, rank = geometry.num_experts, config.rank(f.path)
    a = a.view(num_experts, rank, -1)
    if config.options.b_packing == "expert_major":
        b = b.view(-1, num_experts, rank).permute(1, 0, 2)
    else:
        b = b.view(-1, rank, num_experts).permute(2, 0, 1)
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
    return ProjectionLora(a, b, torch.tensor([scaling], dtype=torch.float32))
