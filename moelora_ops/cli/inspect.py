"""Say what is in an adapter on disk, which format it has and how that is proved, and whether it would load.

With --base the adapter is loaded as `load_adapter` does it, values included. Without it, files, config, names and values are
checked, and whether the tensors fit a base stays open. Exit code 1 if the adapter would be refused.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Sequence

from ..adapters import LoraAdapter, MoeGeometry, ProjectionLora, files
from ..adapters.config import Options
from ..adapters.loading import choose_reader, load, read_config, sort_names
from ..errors import AdapterError

NAME = "inspect"
HELP = "what is in an adapter, whether it would load, and why not"

_CONFIG_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters", "peft_version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, help="folder of the adapter, or its .safetensors file")
    parser.add_argument("--base", type=Path, metavar="CONFIG", help="config.json of the base model, or its folder")
    parser.add_argument("--max-rank", type=int, help="rank of the pool that shall take it")
    parser.add_argument("--b-packing", choices=("expert_major",), help="as of load_adapter")
    parser.add_argument("--orientation", choices=("natural", "reversed"), help="as of load_adapter")
    parser.add_argument("--strict", action="store_true", help="refuse tensors that are not for routed experts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(options: argparse.Namespace) -> int:
    found = inspect(
        options.adapter,
        options.base,
        max_rank=options.max_rank,
        b_packing=options.b_packing,
        orientation=options.orientation,
        strict=options.strict,
    )
    print(json.dumps(found, indent=2) if options.json else "\n".join(map(_printable, _text(found))))
    return 1 if found["loads"] is False else 0


def inspect(
    path: Path,
    base: Any = None,
    *,
    max_rank: int | None = None,
    b_packing: str | None = None,
    orientation: str | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """What `moelora inspect --json` prints.

    Returns: adapter, files and their bytes, config (fields that count), tensors (groups of names with shapes), unused (names
        that are not for routed experts), base, format, proof, layers (what would be loaded), loads (None: no base to
        tell), error.
    """
    found: dict[str, Any] = {"adapter": str(path), "files": {}, "config": {}, "tensors": [], "unused": [], "base": None}
    found |= {"format": None, "proof": None, "layers": [], "loads": None, "error": None}
    try:
        geometry = None
        if base is not None:
            geometry = MoeGeometry.from_config(base)
            found["base"] = _base(geometry)
        weights = files.find(path)
        found["files"] = {file.name: file.stat().st_size for file in weights}
        _look(weights, geometry, strict, Options(b_packing, orientation), found)
        if geometry is not None:
            adapter, reading = load(
                path, geometry, max_rank=max_rank, b_packing=b_packing, orientation=orientation, strict=strict
            )
            found |= {"format": reading.format, "proof": reading.proof, "layers": _layers(adapter), "loads": True}
    except (AdapterError, ValueError) as error:
        found |= {"loads": False, "error": str(error)}
    return found


def _look(weights: list[Path], geometry: MoeGeometry | None, strict: bool, options: Options, found: dict[str, Any]) -> None:
    """All that can be said without a base; what is found before a refusal stays in `found`."""
    with files.TensorFiles(weights) as tensors:
        found["tensors"] = _groups(tensors)
        fields = files.read_json_object(weights[0].parent / files.CONFIG, "adapter config")
        found["config"] = {name: fields[name] for name in _CONFIG_FIELDS if fields.get(name)}
        found["config"] |= {"lora_parameters": fields["lora_parameters"]} if "lora_parameters" in fields else {}
        read_config(weights[0].parent, geometry, options)
        names, found["unused"] = sort_names(tensors)
        reader = choose_reader(names)
        found["format"] = "nothing for routed experts" if reader is None else reader.NAME
        if geometry is not None:
            return  # `load` reads the values
        if strict and found["unused"]:
            raise AdapterError(f"strict=True takes tensors of routed experts only, got {found['unused'][0]}")
        for name in names:
            tensors.read(name)


def _groups(tensors: files.TensorFiles) -> list[dict[str, Any]]:
    """Names that differ in numbers alone, with what is the same in them."""
    groups: dict[str, dict[str, Any]] = {}
    for name in tensors.names:
        key = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)
        group = groups.setdefault(key, {"names": key, "count": 0, "shapes": []})
        group["count"] += 1
        shape = list(tensors.shape(name))
        if shape not in group["shapes"]:
            group["shapes"].append(shape)
    return list(groups.values())


def _base(geometry: MoeGeometry) -> dict[str, Any]:
    return {
        "model_type": geometry.model_type,
        "moe_layers": list(geometry.moe_layers),
        "num_experts": geometry.num_experts,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "gated": geometry.gated,
    }


def _layers(adapter: LoraAdapter) -> list[dict[str, Any]]:
    num_experts = adapter.geometry.num_experts
    order = ("gate", "up", "down")
    return [
        {"layer": layer, "projection": name, **_projection(projections[name], num_experts)}
        for layer, projections in sorted(adapter.layers.items())
        for name in order
        if name in projections
    ]


def _projection(lora: ProjectionLora, num_experts: int) -> dict[str, Any]:
    used = (lora.a != 0).any(2).expand(num_experts, -1) | (lora.b != 0).any(1).expand(num_experts, -1)
    adapted = (lora.scaling != 0).expand(num_experts)
    ranks = {int(row.nonzero().max()) + 1 for row in used[adapted] if row.any()}
    return {
        "ranks": sorted(ranks),
        "scalings": sorted({float(s) for s in lora.scaling if s != 0}),
        "experts": int(adapted.sum()),
        "a": "per expert" if len(lora.a) > 1 or num_experts == 1 else "shared",
        "b": "per expert" if len(lora.b) > 1 or num_experts == 1 else "shared",
        "dtype": str(lora.a.dtype).removeprefix("torch."),
        "zero": not bool(lora.b.any()),
    }


def _text(found: dict[str, Any]) -> list[str]:
    lines = [f"adapter  {found['adapter']}"]
    lines += [f"file     {name}, {size:,} bytes" for name, size in found["files"].items()]
    if found["config"]:
        lines.append("config   " + ", ".join(f"{name} {_short(value)}" for name, value in found["config"].items()))
    if found["base"]:
        base = found["base"]
        lines.append(
            f"base     {base['model_type'] or 'no model_type'}, experts in layers {_ranges(base['moe_layers'])}: "
            f"{base['num_experts']}, hidden {base['hidden_size']}, intermediate {base['intermediate_size']}"
            f"{'' if base['gated'] else ', not gated'}"
        )
    lines += [f"{name:8} {found[name]}" for name in ("format", "proof") if found[name]]
    if found["layers"]:
        lines += ["", *_table([("layers", "projection", "rank", "scaling", "experts", "A", "B", "dtype"), *_rows(found)])]
    elif found["tensors"]:
        rows = [(g["names"], str(g["count"]), " ".join(map(str, g["shapes"][:4]))) for g in found["tensors"]]
        lines += ["", *_table([("tensors (* a number)", "count", "shapes"), *rows])]
    if found["unused"]:
        lines += [
            "",
            f"not for routed experts, listed in .unused: {len(found['unused'])}",
            *(f"  {n}" for n in found["unused"]),
        ]
    if found["loads"] is False:
        return [*lines, "", f"REFUSED: {found['error']}"]
    if found["loads"] is None:
        return [*lines, "", "not refused so far: --base CONFIG tells whether it fits"]
    return [*lines, "", "loads"]


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The layers' rows, those of equal layers as one."""
    equal: dict[tuple[str, ...], list[int]] = {}
    for row in found["layers"]:
        ranks = [str(r) for r in row["ranks"]] or ["0"]
        scalings = [f"{s:.6g}" for s in row["scalings"]] or ["0"]
        cells = (
            row["projection"],
            "-".join((ranks[0], ranks[-1])[: len(ranks)]),
            "-".join((scalings[0], scalings[-1])[: len(scalings)]),
            f"{row['experts']} of {found['base']['num_experts']}",
            row["a"],
            row["b"] + (", all zero" if row["zero"] else ""),
            row["dtype"],
        )
        equal.setdefault(cells, []).append(row["layer"])
    return [(_ranges(layers), *cells) for cells, layers in sorted(equal.items(), key=lambda item: item[1][0])]


def _ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends))


def _printable(line: str) -> str:
    """Names come from files of others: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
