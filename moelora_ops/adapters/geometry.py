"""What an adapter must fit: the sizes of a base model's routed experts, read from its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from .files import read_json_object

# The same size goes by several names; the first one that a config has counts.
_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
# The experts may have an input of their own width.
_HIDDEN = ("moe_latent_size", "moe_hidden_size", "hidden_size")
# Where multimodal models keep the config of their language model.
_INNER = ("text_config", "thinker_config", "llm_config", "language_config")
_NOT_GATED = ("nemotron_h",)
_INTERLEAVED = ("gpt_oss",)
_TRANSPOSED = ("gpt_oss", "openai_privacy_filter", "aria", "aria_text", "llama4", "llama4_text")
# Families whose first projection has more rows than its experts, or experts of several sizes in one layer.
_NOT_READ = ("longcat_flash", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text")
# Far above any model: what is larger is a mistake that would cost memory and time before it shows.
_MOST = {"layers": 10_000, "experts": 65_536, "any": 2**31 - 1}


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
    top_k: int | None = None  # experts of a token, where the config says it

    @classmethod
    def from_config(cls, config: Any) -> MoeGeometry:
        """Read the geometry from a transformers config object, its dict, or the path of a config.json.

        Raises: AdapterError naming the field that is missing or wrong.
        """
        fields = _of_language_model(_as_mapping(config))
        model_type = fields.get("model_type", "")
        if not isinstance(model_type, str):
            raise AdapterError(f"config field model_type must be a string, got {model_type!r}")
        if model_type in _NOT_READ:
            raise AdapterError(f"config field model_type must be of a family with equal experts in a layer, got {model_type!r}")
        kinds = _layer_kinds(fields) if model_type in _NOT_GATED else None  # hybrid models list their layers instead
        num_layers = _size(fields, ("num_hidden_layers",), default=None if kinds is None else len(kinds), most=_MOST["layers"])
        num_experts = _size(fields, _NUM_EXPERTS, most=_MOST["experts"])
        moe_layers = _moe_layers(fields, model_type, num_layers, num_experts)
        if not moe_layers:
            raise AdapterError(f"config must be of a model with routed experts, got none in its {num_layers} layers")
        return cls(
            num_layers=num_layers,
            moe_layers=moe_layers,
            num_experts=num_experts,
            hidden_size=_size(fields, (next((n for n in _HIDDEN if fields.get(n) is not None), _HIDDEN[-1]),)),
            intermediate_size=_size(fields, _INTERMEDIATE),
            gated=model_type not in _NOT_GATED,
            interleaved=model_type in _INTERLEAVED,
            transposed=model_type in _TRANSPOSED,
            model_type=model_type,
            top_k=_size(fields, _TOP_K, default=0, least=0) or None,
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


def _of_language_model(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal config that has the experts."""
    for name in _INNER:
        inner: Any = fields.get(name)
        if hasattr(inner, "to_dict"):
            inner = inner.to_dict()
        if isinstance(inner, Mapping):
            found = _of_language_model(inner)
            if any(found.get(number) is not None for number in _NUM_EXPERTS):
                return found
    return fields


def _size(
    fields: Mapping[str, Any], names: tuple[str, ...], default: int | None = None, least: int = 1, most: int = _MOST["any"]
) -> int:
    value = next((fields[n] for n in names if fields.get(n) is not None), default)
    if value is None:
        raise AdapterError(f"config field {' or '.join(names)} must be given, got none of them")
    if isinstance(value, (list, tuple)) and value and all(v == value[0] for v in value):
        value = value[0]  # one for each layer, all the same
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AdapterError(f"config field {' or '.join(names)} must be an int >= {least}, got {value!r:.100}")
    if value > most:
        raise AdapterError(f"config field {' or '.join(names)} must be <= {most}, got {value!r:.100}")
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


def _moe_layers(fields: Mapping[str, Any], model_type: str, num_layers: int, num_experts: int) -> tuple[int, ...]:
    """Which decoder layers have routed experts."""
    every = range(num_layers)
    if model_type in _NOT_GATED:
        return tuple(i for i, kind in enumerate(_layer_kinds(fields)) if kind in ("moe", "E"))
    if fields.get("enable_moe_block") is False:
        return ()
    if model_type in ("llama4", "llama4_text"):
        step = _size(fields, ("interleave_moe_layer_step",), default=1)
        chosen = _listed(fields, "moe_layers") or range(step - 1, num_layers, step)
        return tuple(i for i in every if i in chosen)
    if model_type == "jamba":
        period, offset = _size(fields, ("expert_layer_period",), 2), _size(fields, ("expert_layer_offset",), 1, least=0)
        return tuple(i for i in every if (i - offset) % period == 0 and num_experts > 1)
    kinds = _listed(fields, "mlp_layer_types")
    if kinds:  # says it for each layer, whatever the fields of older configs beside it say
        return tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind != "dense")
    first = _size(fields, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), default=0, least=0)
    last = fields.get("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else _size(fields, ("moe_layer_end_index",), least=0)
    step = _size(fields, ("decoder_sparse_step", "moe_layer_interval"), default=1)
    frequency = fields.get("moe_layer_freq")
    only_mlp = _listed(fields, "mlp_only_layers")
    if isinstance(frequency, (list, tuple)):  # one flag for each layer
        sparse = [i for i, flag in enumerate(frequency[:num_layers]) if flag]
    else:
        stride = _size(fields, ("moe_layer_freq",), default=1)
        sparse = [i for i in every if i % stride == 0]
    return tuple(i for i in sparse if first <= i <= last and (i + 1) % step == 0 and i not in only_mlp)
