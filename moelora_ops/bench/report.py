"""Results as a table, as JSON lines, and as a list of targets."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import torch

from .. import __version__
from .floors import Ceilings
from .measure import Result, from_json, to_json
from .targets import verdicts

LEGEND = """\
Microseconds of one expert layer, routing included. "x" is the ratio to the floor left of it; "idle" is the call with adapters
in which no token has one, "empty" the one whose pool holds none, both over base. "route" is the layer's own sort; "align" is
that of the open-door ops and "delta" what they add to a layer: alignment and both projections. "batched" is cuBLAS on the same
products. Launches, extra memory (its bound in brackets) and "host", the CPU time of an eager call, are those of the layer with
adapters. A star: the weights may be warm in the L2."""
COLUMNS = (
    "cell", "floor base", "base", "x", "floor LoRA", "LoRA", "x", "LoRA / base", "idle", "empty", "batched", "route", "align",
    "delta", "launches", "extra MB", "host", "targets met",
)  # fmt: skip


def environment(device: torch.device, ceilings: Ceilings, argv: Sequence[str]) -> dict[str, Any]:
    """What the numbers of a run depend on: it stands in every JSON line."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "moelora_ops": __version__,
        "torch": torch.__version__,
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
        "command": shlex.join(["moelora", *argv]),
        **dataclasses.asdict(ceilings),
    }


def heading(about: dict[str, Any]) -> str:
    """The lines above a table."""
    return "\n".join(
        [
            f"{about['device']}, moelora_ops {about['moelora_ops']}, torch {about['torch']}, triton {about['triton']}, bf16",
            f"copy {about['bandwidth'] / 1e12:.2f} TB/s, matmul {about['rate'] / 1e12:.1f} TFLOP/s; `{about['command']}`",
            "",
            LEGEND,
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{' --- |' * len(COLUMNS)}",
        ]
    )


def row(result: Result) -> Iterator[str]:
    """The line of a cell, then one for each part that failed and for each peer."""
    us, cell = result.us, str(result.cell) + ("" if result.cold is not False else " *")
    met = [v.met for v in verdicts(result)]
    bound, extra = result.extra_bound / 1e6, result.extra_bytes.get("lora")
    launches = result.launches.get("lora")
    if us:
        fields = [
            cell,
            *(_us(result.floor_base), _us(us.get("base")), _ratio(result.ratio("base", result.floor_base))),
            *(_us(result.floor_lora), _us(us.get("lora")), _ratio(result.ratio("lora", result.floor_lora))),
            *(_ratio(result.ratio(name, "base")) for name in ("lora", "idle", "unloaded")),
            *(_us(us.get(name)) for name in ("batched", "route", "align", "delta")),
            "-" if launches is None else str(launches),
            "-" if extra is None else f"{extra / 1e6:.2f} ({bound:.2f})",
            _us(result.host_us.get("lora")),
            f"{sum(met)} of {len(met)}" if met else "-",
        ]
        yield f"| {' | '.join(fields)} |"
    for name, time in us.items():
        if " " in name:
            yield f"| {cell}: {name} | {time:.1f} |"
    for part, message in result.errors.items():
        yield f"| {cell}: {part} FAILED | {' '.join(message.split())} |"


def target_table(results: Iterable[Result]) -> Iterator[str]:
    """Every bar, what was measured, and by how much it was missed."""
    judged = [(result, verdict) for result in results for verdict in verdicts(result)]
    if not judged:
        return
    yield "| cell | target | at most | measured | |\n| --- | --- | --- | --- | --- |"
    for result, verdict in judged:
        yield f"| {result.cell} | {verdict.what} | {verdict.limit:.2f} | {verdict.measured:.3f} | {verdict} |"
    yield f"\n{sum(v.met for _, v in judged)} of {len(judged)} targets met"


def line(result: Result, about: dict[str, Any]) -> str:
    """One JSON line: the environment, every number of the cell, and its targets."""
    judged = [{**dataclasses.asdict(v), "met": v.met} for v in verdicts(result)]
    return json.dumps({"about": about, **to_json(result), "targets": judged})


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The environment of the last run in a file of JSON lines, and all its results."""
    data = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    if not data:
        raise ValueError(f"{path} has no results")
    return data[-1]["about"], [from_json(entry) for entry in data]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
