"""The overhead of adapters against the number of tokens."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Sequence

from .measure import Result

WHY_NOT = "a plot needs matplotlib: pip install matplotlib, or moelora_ops[bench]"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def curves(results: Sequence[Result]) -> dict[str, list[tuple[int, float, float]]]:
    """Per kind of cell, the points (T, LoRA / base - 1 in percent, LoRA / floor LoRA) in the order of T."""
    points: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for result in results:
        overhead, above = result.ratio("lora", "base"), result.ratio("lora", result.floor_lora)
        if overhead is not None and above is not None:
            words = [word for word in str(result.cell).split() if not word.startswith("T=")]
            points[" ".join(words)].append((result.cell.num_tokens, 100 * (overhead - 1), above))
    return {name: sorted(values) for name, values in points.items()}


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Two panels over T: what adapters add to the layer without, and the layer with adapters over its floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = curves(results)
    longest = max(map(len, found.values()), default=0)
    for name, values in found.items():
        if len(values) < min(3, longest):
            continue  # in a full grid, dozens of lone points hide the curves
        tokens, overhead, above = zip(*values)
        left.plot(tokens, overhead, marker="o", markersize=3, label=name)
        right.plot(tokens, above, marker="o", markersize=3, label=name)
    for axes, what in ((left, "adapters add to the layer, %"), (right, "layer with adapters / floor")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
    right.axhline(1, color="black", linewidth=0.5)
    right.legend(fontsize=6)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
