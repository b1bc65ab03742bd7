"""`load_adapter`: find the files, check the config, choose the reader.

To add a format, add a file with NAME, `matches(rest)` (of a name, after `layers.N.`) and
`read(tensors, names, config, geometry)` and list it in READERS.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..checks import check_positive
from ..errors import AdapterError
from . import automodel, files, ktransformers, mlx, peft_linear, peft_parameters
from .adapter import LoraAdapter
from .config import NO_OPTIONS, AdapterConfig, Options, is_mlx
from .geometry import MoeGeometry
from .names import check_one_adapter, is_decoder, is_for_experts, split, unknown
from .pairs import Reading

READERS: tuple[Any, ...] = (peft_linear, peft_parameters, automodel, ktransformers, mlx)
NOTHING = Reading({}, "nothing for routed experts", "names")


def load_adapter(
    path: str | os.PathLike[str],
    config: Any,
    *,
    max_rank: int | None = None,
    b_packing: str | None = None,
    strict: bool = False,
    orientation: str | None = None,
) -> LoraAdapter:
    """Read an adapter for routed experts from disk, exactly or not at all. docs/adapters.md lists the formats.

    Args:
        path: the adapter's folder, or its .safetensors file with adapter_config.json beside it. Pickles are never opened.
        config: of the base model: a transformers config, its dict, a path to config.json, or a `MoeGeometry`.
        max_rank: largest rank allowed, such as a pool's; None: any.
        b_packing: "expert_major" for fused lora_B tensors with column e * r + j instead of PEFT's j * E + e (Unsloth before
            2026-09-17, Megatron-Bridge); no file shows which of the two it has. Other formats do not look at it.
        strict: refuse tensors that are not for routed experts instead of listing them in `.unused`.
        orientation: "natural" (lora_A has the columns of the input) or "reversed", for fused tensors of which neither shapes
            nor peft_version tell; one that the file contradicts is refused. Other formats do not look at it.

    Returns: the canonical adapter, on the CPU, in the dtype of the file.
    Raises: AdapterError naming the tensor or field, what was expected and what came, for anything that is not understood.
    Warns: UserWarning where nothing in the file is for routed experts: the adapter will not change them.
    """
    adapter, _ = load(path, config, max_rank=max_rank, b_packing=b_packing, strict=strict, orientation=orientation)
    if not adapter.layers:
        warnings.warn(f"{adapter.name} has no tensors for routed experts: only {_few(adapter.unused)}", stacklevel=2)
    return adapter


def load(
    path: str | os.PathLike[str],
    config: Any,
    *,
    max_rank: int | None = None,
    b_packing: str | None = None,
    strict: bool = False,
    orientation: str | None = None,
) -> tuple[LoraAdapter, Reading]:
    """`load_adapter`, and what the reader says about the format; no warning."""
    options = Options(b_packing, orientation)
    if max_rank is not None:
        check_positive("max_rank", max_rank)
    geometry = config if isinstance(config, MoeGeometry) else MoeGeometry.from_config(config)
    weights = files.find(path)
    fields = read_config(weights[0].parent, geometry, options)
    with files.TensorFiles(weights) as tensors:
        names, unused = sort_names(tensors)
        if strict and unused:
            raise AdapterError(f"strict=True takes tensors of routed experts only, got {_few(unused)}")
        reader = choose_reader(names)
        reading = reader.read(tensors, names, fields, geometry) if reader else NOTHING
    adapter = LoraAdapter(weights[0].absolute().parent.name, geometry, reading.layers, unused)
    if max_rank is not None and adapter.rank > max_rank:
        layer, name = next((i, n) for i, p in adapter.layers.items() for n, lora in p.items() if lora.rank == adapter.rank)
        raise AdapterError(
            f"{adapter.name}: rank must be <= max_rank = {max_rank}, got {adapter.rank} in {name} of layer {layer}"
        )
    return adapter, reading


def read_config(folder: Path, geometry: MoeGeometry | None, options: Options = NO_OPTIONS) -> AdapterConfig:
    """The config of an adapter, of whichever tool.

    Args:
        geometry: of the base; None where it is not known, as for `moelora inspect` without --base.
        options: of the caller.

    Raises: AdapterError naming the field, what was expected and what came.
    """
    fields = files.read_json_object(folder / files.CONFIG, "adapter config")
    if is_mlx(fields):
        return AdapterConfig.from_mlx(fields, options=options)
    divisor = 1
    if (folder / files.AUTOMODEL_CONFIG).exists():
        more = files.read_json_object(folder / files.AUTOMODEL_CONFIG, "NeMo Automodel's config")
        if more.get("use_dora"):
            raise AdapterError(f"{files.AUTOMODEL_CONFIG} field use_dora must be unset: DoRA is not plain LoRA")
        if more.get("moe_rank_scaling") and geometry is not None:
            if geometry.top_k is None:
                raise AdapterError(
                    f"config field num_experts_per_tok must be given for {files.AUTOMODEL_CONFIG} field moe_rank_scaling, by "
                    "which the rank of experts is r // num_experts_per_tok; got none"
                )
            divisor = geometry.top_k
    return AdapterConfig.from_fields(fields, rank_divisor=divisor, options=options)


def sort_names(tensors: files.TensorFiles) -> tuple[list[str], list[str]]:
    """Names of tensors that are for routed experts, and of the others.

    Raises: AdapterError for an empty file, several adapters in one file, and tensors that no plain LoRA has.
    """
    if not tensors.names:
        raise AdapterError("the adapter must hold tensors, got none")
    for name in tensors.names:
        if "lora_magnitude_vector" in name:
            raise AdapterError(f"{name} must not be there, got it: DoRA is not plain LoRA; merge it into the base")
    check_one_adapter(tensors.names)
    names: list[str] = []
    others: list[str] = []
    for name in tensors.names:
        (names if is_for_experts(name) else others).append(name)
    return names, others


def choose_reader(names: list[str]) -> ModuleType | None:
    """The one reader whose format all expert tensors have; None where there are none."""
    chosen: dict[int, tuple[ModuleType, str]] = {}
    begins: set[str] = set()
    rests: set[str] = set()
    for name in names:
        begin, rest = split(name)
        if begin in begins and rest in rests:
            continue
        place = next((i for i, reader in enumerate(READERS) if reader.matches(rest)), None)
        if place is None or not is_decoder(begin):
            raise unknown(name)
        chosen.setdefault(place, (READERS[place], name))
        begins.add(begin)
        rests.add(rest)
    if len(chosen) > 1:
        raise AdapterError(f"expert tensors must have one format, got {' and '.join(name for _, name in chosen.values())}")
    return next((reader for reader, _ in chosen.values()), None)


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
