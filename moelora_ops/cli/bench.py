"""Check the ops' values on this device, then time them against its ceilings and their targets.

Each cell is compared with the fp32 reference first. On a GPU the times are medians over replays of CUDA graphs that run through
distinct inputs and routings, so that weights come from memory and not from the L2; routing is included. Exit code 1 if a value
is wrong or a cell could not be measured; a missed target is printed, not an error.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Callable, TypeVar

import torch

from ..bench import cells, measure, peers, plot, report

NAME = "bench"
HELP = "check values, then time the ops against this device's ceilings and their targets"

PRESETS = ("quick", "targets", "full")
GRID = ("shapes", "tokens", "adapters", "ranks", "popularity", "routing")
FULL_SECONDS = 480.0  # of the full grid: then no further cell is started

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, help="cells to measure; default: quick, unless a grid is given")
    grid = parser.add_argument_group("a grid of cells, instead of a preset (lists are separated by commas)")
    grid.add_argument("--shapes", type=_list(_one_of(cells.SHAPES)), help=f"all, or of {', '.join(cells.SHAPES)}")
    grid.add_argument("--tokens", type=_list(_positive), help="tokens of a batch (default: 1,8,32,128,512)")
    grid.add_argument("--adapters", type=_list(_positive), help="adapter slots (default: 8)")
    grid.add_argument("--ranks", type=_list(_ranks), help="16, 8+16+64 (slots take turns) or 8@64 (rank 8, pool of rank 64)")
    grid.add_argument("--popularity", type=_list(_one_of(cells.POPULARITIES)), help=", ".join(cells.POPULARITIES))
    grid.add_argument("--routing", type=_list(_one_of(cells.ROUTINGS)), help=", ".join(cells.ROUTINGS))
    parser.add_argument("--ops", type=_list(_one_of(measure.OPS)), default=measure.OPS, help="default: layer,delta,align")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--json", type=Path, help="append a JSON line per cell to this file, as it goes")
    parser.add_argument("--plot", type=Path, help="draw the overhead against the number of tokens (matplotlib)")
    parser.add_argument("--read", type=Path, help="measure nothing: tables and plot of a file written by --json")
    parser.add_argument("--seconds", type=float, help=f"start no cell after this time (default: {FULL_SECONDS:.0f} for full)")
    parser.set_defaults(error=parser.error)


def run(options: argparse.Namespace) -> int:
    if options.plot and not plot.can_plot():
        options.error(plot.WHY_NOT)
    if options.read:
        return _again(options)
    chosen, limit = _cells(options)
    began = time.monotonic()
    bench = measure.Bench(torch.device(_device(options)), options.ops)
    about = report.environment(bench.device, bench.ceilings, options.argv)
    print(report.heading(about), flush=True)
    results = []
    for cell in chosen:
        if time.monotonic() - began > limit:
            break
        results.append(bench.run(cell))
        print("\n".join(report.row(results[-1])), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(report.line(results[-1], about) + "\n")
    left_out = chosen[len(results) :]
    print(f"\n{len(results)} cells in {time.monotonic() - began:.0f} s", peers.missing(bench.peers), sep="; ")
    if left_out:
        print(f"left out after {limit:.0f} s: {', '.join(map(str, left_out))}")
    return _end(options, results, about["device"])


def _again(options: argparse.Namespace) -> int:
    try:
        about, results = report.read(options.read)
    except (OSError, ValueError, KeyError, TypeError) as error:
        options.error(f"--read: {options.read} is not a file written by --json: {error}")
    print(report.heading(about))
    for result in results:
        print("\n".join(report.row(result)))
    return _end(options, results, about["device"])


def _end(options: argparse.Namespace, results: list[measure.Result], device: str) -> int:
    print("", *report.target_table(results), sep="\n")
    if options.plot:
        plot.plot(results, device, options.plot)
    failed = [result for result in results if result.errors]
    if failed:
        print(f"\nFAILED in {len(failed)} of {len(results)} cells: their rows say what")
    return 1 if failed else 0


def _cells(options: argparse.Namespace) -> tuple[list[cells.Cell], float]:
    """The cells, and the seconds after which no further one is started."""
    gpu = _device(options) == "cuda"
    given = [name for name in GRID if getattr(options, name)]
    if given and options.preset:
        options.error(f"--preset and --{given[0]} exclude each other")
    endless = float("inf")
    if given:
        chosen = cells.grid(
            options.shapes or [cells.QWEN if gpu else cells.TINY.name],
            options.tokens or [1, 8, 32, 128, 512],
            options.adapters or [8],
            options.ranks or ["16"],
            options.popularity or ["uniform"],
            options.routing or ["uniform"],
        )
        return list(chosen), options.seconds or endless
    name = options.preset or "quick"
    if not gpu:
        if name != "quick":
            options.error(f"--preset {name} needs a GPU; on a CPU choose --shapes and --tokens")
        name = "tiny"
    return cells.preset(name), options.seconds or (FULL_SECONDS if name == "full" else endless)


def _device(options: argparse.Namespace) -> str:
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _list(parse: Callable[[str], list[T]]) -> Callable[[str], list[T]]:
    """Comma-separated values, each parsed into one or several."""
    return lambda text: [value for word in text.split(",") for value in parse(word.strip())]


def _one_of(names: object) -> Callable[[str], list[str]]:
    known = list(names)  # type: ignore[call-overload]

    def parse(word: str) -> list[str]:
        if word == "all":
            return [name for name in known if name != cells.TINY.name]
        if word not in known:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {word!r}")
        return [word]

    return parse


def _positive(word: str) -> list[int]:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {word!r}")
    return [int(word)]


def _ranks(word: str) -> list[str]:
    try:
        cells.parse_ranks(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return [word]
