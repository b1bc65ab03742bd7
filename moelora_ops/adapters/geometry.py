"""What an adapter must fit: the sizes of a base model's routed experts, read from its config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError

# The same size goes by several names; the first one that a config has counts.
_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_NOT_GATED = ("nemotron_h",)
_INTERLEAVED = ("gpt_oss", "openai_privacy_filter")
_TRANSPOSED = ("gpt_oss", "openai_privacy_filter", "aria", "aria_text", "llama4", "llama4_text")


@dataclass(frozen=True)
class MoeGeometry:
    """Sizes and storage of the routed experts of a base model.

    >>> MoeGeometry.from_config({"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
    ...                          "hidden_size": 4096, "intermediate_size": 14336}).moe_layers
    (0, 1)
    """

    num_layers: int  # decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # ids of those with routed experts
    num_experts: int
    hidden_size: int  # width of the experts' input and output
    intermediate_size: int
    gated: bool = True  # gate and up, or up alone
    interleaved: bool = False  # base rows of the first projection alternate gate, up, gate, ...
    transposed: bool = False  # base weights are stored [E, in, out]
    model_type: str = ""

    @classmethod
    def from_config(cls, config: Any) -> MoeGeometry:
        """Read the geometry from a transformers config object, its dict, or the path of a config.json.

        Raises: AdapterError naming the field that is missing or wrong.
        """
        fields = _as_mapping(config)
        inner = fields.get("text_config")
        if isinstance(inner, Mapping):  # multimodal models: the experts are in the language model
            fields = inner
        model_type = fields.get("model_type", "")
        if not isinstance(model_type, str):
            raise AdapterError(f"config field model_type must be a string, got {model_type!r}")
        kinds = _layer_kinds(fields) if model_type in _NOT_GATED else None  # hybrid models list their layers instead
        num_layers = _size(fields, ("num_hidden_layers",), default=None if kinds is None else len(kinds))
        latent = fields.get("moe_latent_size")
        return cls(
            num_layers=num_layers,
            moe_layers=_moe_layers(fields, model_type, num_layers),
            num_experts=_size(fields, _NUM_EXPERTS),
            hidden_size=_size(fields, ("hidden_size",) if latent is None else ("moe_latent_size",)),
            intermediate_size=_size(fields, _INTERMEDIATE),
            gated=model_type not in _NOT_GATED,
            interleaved=model_type in _INTERLEAVED,
            transposed=model_type in _TRANSPOSED,
            model_type=model_type,
        )

    def sizes(self, projection: str) -> tuple[int, int]:
        """(in, out) of "gate", "up" or "down"."""
        if projection == "down":
            return self.intermediate_size, self.hidden_size
        return self.hidden_size, self.intermediate_size


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        return read_json_object(path, "config")
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise AdapterError(
            f"config must be a transformers config, a dict or a path to config.json, got {type(config).__name__}"
        )
    return config


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises: AdapterError where the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterError(f"{what} must be a readable file {path.name}, got {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{what} {path.name} must be JSON, got {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{what} {path.name} must be a JSON object, got {type(value).__name__}")
    return value


def _size(fields: Mapping[str, Any], names: tuple[str, ...], default: int | None = None, least: int = 1) -> int:
    value = next((fields[n] for n in names if fields.get(n) is not None), default)
    if value is None:
        raise AdapterError(f"config field {' or '.join(names)} must be given, got none of them")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AdapterError(f"config field {' or '.join(names)} must be an int >= {least}, got {value!r}")
    return value


def _listed(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)):
        raise AdapterError(f"config field {name} must be a list, got {value!r}")
    return list(value)


def _layer_kinds(fields: Mapping[str, Any]) -> list[Any]:
    """One entry for each layer of a hybrid model: names, or letters of a pattern."""
    pattern = fields.get("layers_block_type") or fields.get("hybrid_override_pattern")
    if not isinstance(pattern, (list, tuple, str)):
        raise AdapterError(f"config field layers_block_type must list the layers, got {pattern!r}")
    return list(pattern)


def _moe_layers(fields: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int, ...]:
    """Which decoder layers have routed experts."""
    if model_type in _NOT_GATED:
        return tuple(i for i, kind in enumerate(_layer_kinds(fields)) if kind in ("moe", "E"))
    if model_type in ("llama4", "llama4_text"):
        step = _size(fields, ("interleave_moe_layer_step",), default=1)
        chosen = _listed(fields, "moe_layers") or range(step - 1, num_layers, step)
        return tuple(i for i in range(num_layers) if i in chosen)
    only_mlp = _listed(fields, "mlp_only_layers")
    dense = {i for i in range(num_layers) if i in only_mlp}
    dense |= {i for i, kind in enumerate(_listed(fields, "mlp_layer_types")) if kind == "dense"}
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):  # one flag for each layer
        dense |= {i for i, flag in enumerate(frequency) if not flag}
    every = _size(fields, ("moe_layer_freq",), default=1) if isinstance(frequency, int) else 1
    first = _size(fields, ("first_k_dense_replace",), default=0, least=0)
    step = _size(fields, ("decoder_sparse_step",), default=1)
    return tuple(i for i in range(first, num_layers) if i not in dense and i % every == 0 and (i + 1) % step == 0)
