"""`load_adapter`: find the files, check the config, choose the reader.

To add a format, add a file with `matches(name)` and `read(tensors, config, geometry)` and list it in `_READERS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ..checks import check_positive
from ..errors import AdapterError
from . import files, peft_linear, peft_parameters
from .adapter import LoraAdapter
from .config import AdapterConfig
from .geometry import MoeGeometry, read_json_object
from .names import is_for_experts

_READERS = (peft_linear, peft_parameters)


def load_adapter(
    path: str | os.PathLike[str],
    config: Any,
    *,
    max_rank: int | None = None,
    b_packing: str | None = None,
    strict: bool = False,
) -> LoraAdapter:
    """Read an adapter for routed experts from disk, exactly or not at all.

    Args:
        path: the adapter's folder, or its .safetensors file with adapter_config.json beside it. Pickles are never opened.
        config: of the base model: a transformers config, its dict, a path to config.json, or a `MoeGeometry`.
        max_rank: largest rank allowed, such as a pool's; None: any.
        b_packing: "expert_major" for fused lora_B tensors with column e * r + j instead of PEFT's j * E + e (Unsloth before
            2026-09-17); no file shows which of the two it has.
        strict: refuse tensors that are not for routed experts instead of listing them in `.unused`.

    Returns: the canonical adapter, on the CPU, in the dtype of the file.
    Raises: AdapterError naming the tensor or field, what was expected and what came, for anything that is not understood.
    """
    if b_packing not in (None, "expert_major"):
        raise ValueError(f'b_packing must be "expert_major" or None, got {b_packing!r}')
    if max_rank is not None:
        check_positive("max_rank", max_rank)
    geometry = config if isinstance(config, MoeGeometry) else MoeGeometry.from_config(config)
    weights_path, config_path = files.find(path)
    adapter_config = AdapterConfig.from_fields(read_json_object(config_path, "adapter config"), b_packing=b_packing)
    with files.TensorFile(weights_path) as file:
        for name in file.names:
            if "lora_magnitude_vector" in name:
                raise AdapterError(f"{name} must not be there: DoRA is not plain LoRA")
        names = [name for name in file.names if is_for_experts(name)]
        unused = [name for name in file.names if not is_for_experts(name)]
        if strict and unused:
            raise AdapterError(f"strict=True takes tensors of routed experts only, got {_few(unused)}")
        reader = _choose_reader(names)
        layers = {} if reader is None else reader.read({name: file.read(name) for name in names}, adapter_config, geometry)
    adapter = LoraAdapter(weights_path.absolute().parent.name, geometry, layers, unused)
    if max_rank is not None and adapter.rank > max_rank:
        raise AdapterError(f"{adapter.name}: rank must be <= max_rank = {max_rank}, got {adapter.rank}")
    return adapter


def _choose_reader(names: list[str]) -> ModuleType | None:
    """The one reader whose format all expert tensors have; None where there are none."""
    for name in names:
        if not any(reader.matches(name) for reader in _READERS):
            raise AdapterError(f"{name} must be a LoRA tensor of routed experts in a known format, got an unknown name")
    chosen = [reader for reader in _READERS if any(map(reader.matches, names))]
    if len(chosen) > 1:
        examples = (next(filter(reader.matches, names)) for reader in chosen)
        raise AdapterError(f"expert tensors must have one format, got {' and '.join(examples)}")
    return chosen[0] if chosen else None


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
