"""Search configurations of the layer op that are faster on this GPU than the rules, and write them as tables.

For each shape and number of tokens: candidates are compiled in parallel, each stage is timed alone with cold weights, the best
ones are combined, checked against the reference, and compared with the rule on the whole layer (with adapters plus without).
What gains less than 2 %, or loses anywhere in the range of sizes that it would serve, is not taken: there the rule stands. A
table holds at most a dozen keys. Exit code 1 if a candidate computed wrong values, or with --check a rule is more than 10 %
slower than the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Iterator

import torch

from ..bench import cells
from ..bench.cells import Cell
from ..bench.inputs import Weights
from ..kernels import config
from ..tuning import candidates, compiling, measure, search, tables
from ..tuning.search import Found, Layer
from .bench import _list, _one_of, _positive

NAME = "tune"
HELP = "search faster configurations for this GPU and write them as tables"

TOKENS = [1, 8, 32, 128, 512, 2048, 8192]
RULES_WITHIN = 1.10  # of the tables, with --check
COLUMNS = ("cell", "rule base", "rule LoRA", "tuned base", "tuned LoRA", "gain", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = f"all, or of {', '.join(cells.SHAPES)} (default: {cells.QWEN})"
    parser.add_argument("--shapes", type=_list(_one_of(cells.SHAPES)), default=[cells.QWEN], help=shapes)
    parser.add_argument("--tokens", type=_list(_positive), default=TOKENS, help=f"default: {','.join(map(str, TOKENS))}")
    parser.add_argument("--adapters", type=int, default=8, help="adapter slots (default: 8)")
    parser.add_argument("--rank", type=int, default=16, help="of all adapters and the pool (default: 16)")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: the package's own, where they are in force)")
    parser.add_argument("--check", type=Path, metavar="DIR", help="search nothing: compare the rules with the tables in DIR")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one a core, at most 24)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further size after this time")
    parser.set_defaults(error=parser.error)


def run(options: argparse.Namespace) -> int:
    for name in ("adapters", "rank", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            options.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    options.tokens = sorted(set(options.tokens))
    if len(options.tokens) > tables.MOST_SIZES:
        options.error(f"--tokens must be at most {tables.MOST_SIZES} numbers, got {len(options.tokens)}")
    if options.check and options.out:
        options.error("--check writes nothing: it excludes --out")
    if options.check and not options.check.is_dir():
        options.error(f"--check must be a folder with tables, got {options.check}")
    if not torch.cuda.is_available():
        options.error("a GPU is needed: torch sees none")
    if importlib.util.find_spec("triton") is None:
        options.error("Triton is needed: it is not installed")
    device, began = torch.device("cuda", torch.cuda.current_device()), time.monotonic()
    print(f"{torch.cuda.get_device_name(device)}; microseconds of one layer, routing included, {options.adapters} adapters")
    print(f"of rank {options.rank}\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    compiler, weights = compiling.Compiler(options.jobs), Weights(device)
    try:
        work, codes = _check if options.check else _tune, []
        for name in options.shapes:
            cell = Cell(name, options.tokens[0], options.adapters, str(options.rank))
            shape = Shape(cell, measure.DeviceTimer(cell, device, weights, compiler), device)
            codes.append(work(options, shape, began))
    finally:
        compiler.close()
    print(f"\n{time.monotonic() - began:.0f} s")
    return max(codes)


class Shape:
    """A layer's shape on a device."""

    def __init__(self, cell: Cell, timer: measure.DeviceTimer, device: torch.device) -> None:
        self.cell, self.timer, self.device = cell, timer, config.describe(device)
        self.top_k = self.cell.case().top_k

    def problem(self, num_tokens: int) -> config.Problem:
        case = self.cell.case().like(num_tokens=num_tokens)
        sizes = (case.num_experts, case.hidden_size, case.intermediate_size, case.num_slices)
        return config.Problem(case.num_pairs, *sizes, case.dtype)

    def rule(self, num_tokens: int) -> config.Experts:
        return config.experts_rule(self.problem(num_tokens), self.device)

    def trials(self, num_tokens: int) -> list[config.Experts]:
        families = candidates.families(self.rule(num_tokens), self.problem(num_tokens), self.device)
        return [tiles for family in families for tiles in family]


def _tune(options: argparse.Namespace, shape: Shape, began: float) -> int:
    ranges, found, before = search.ranges(options.tokens), list[Found](), time.monotonic()
    if before - began < options.seconds:
        shape.timer.compile([(tiles, size) for size in options.tokens for tiles in shape.trials(size)])
        print(f"| {shape.cell.shape}: compiled in {time.monotonic() - before:.0f} s |", flush=True)
    for size, span in ranges.items():
        if time.monotonic() - began >= options.seconds:
            break
        with torch.inference_mode():
            found.append(search.search(size, span, shape.rule, shape.problem(size), shape.device, shape.timer))
        print(_row(shape, found[-1]), flush=True)
    left_out = options.tokens[len(found) :]
    if found:
        table = tables.entries(found, left_out, shape.top_k)
        path = tables.write(table, shape.problem(1), shape.device, options.out)
        print(f"| {shape.cell.shape}: {path or 'the rule stands everywhere, no table'} |")
    if left_out:
        print(f"| {shape.cell.shape}: left out after {options.seconds:.0f} s: {', '.join(map(str, left_out))} |")
    _print_errors(shape)
    return 1 if any(f.wrong for f in found) else 0


def _check(options: argparse.Namespace, shape: Shape, began: float) -> int:
    """The rules against tables that were tuned for the same shape."""
    path = config.table_path("experts", shape.problem(1), shape.device, options.check)
    table = config.read_table(path, config.Experts)
    if not any(table.values()):
        print(f"| {shape.cell.shape}: no configuration in {path} |")
        return 0
    worst = 1.0
    for size in options.tokens:
        rule, tuned = shape.rule(size), config.nearest(table, shape.problem(size).num_pairs)
        if time.monotonic() - began >= options.seconds:
            break
        if tuned is None or tuned == rule:
            continue
        with torch.inference_mode():
            by_rule, by_table = shape.timer.layers([rule, tuned], size)
            right = shape.timer.is_right(tuned, size)
        worst = max(worst, by_rule.total / by_table.total) if right else float("inf")
        print(_row(shape, Found(size, by_rule, by_table, tuned, 0, int(not right))), flush=True)
    print(f"| {shape.cell.shape}: the rules take at most {worst:.2f} x the time of the tables |")
    _print_errors(shape)
    return 1 if worst > RULES_WITHIN else 0


def _row(shape: Shape, found: Found) -> str:
    def times(layer: Layer) -> Iterator[str]:
        yield from (f"{layer.base:.1f}", f"{layer.lora:.1f}")

    notes = [f"{found.refused} refused: they lose nearby"] if found.refused else []
    notes += [f"{found.wrong} WRONG"] if found.wrong else []
    tuned = ["-", "-", "the rule stands"] if found.tuned is None else [*times(found.best), f"{100 * found.gain:.1f} %"]
    cell = dataclasses.replace(shape.cell, num_tokens=found.num_tokens)
    return f"| {' | '.join([str(cell), *times(found.rule), *tuned, '; '.join(notes)])} |"


def _print_errors(shape: Shape) -> None:
    for message, count in shape.timer.errors.items():
        print(f"| {shape.cell.shape}: {count} x {' '.join(message.split())[:300]} |", flush=True)
