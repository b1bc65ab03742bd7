"""What was promised, and whether it is met.

Bars are ratios to the floor, or to another time of the same run, so that they carry over to another device of the kind; the two
sorts have bars in microseconds. A bar derived from a published time of a peer is that time over the floor of the run it was
published with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from .cells import QWEN, Cell, parse_ranks
from .measure import Result

IDLE = 1.01  # x base: no adapter in the batch, or none in the pool
OTHER_SHAPES = 1.10  # x floor LoRA, for 8 <= T <= 64
RANK = 1.10  # x a pool of the adapters' own rank
HOST_US = 60.0  # CPU time of an eager call with adapters
LAYER = {1: 1.75, 8: 1.08, 32: 1.07, 128: 1.05, 512: 1.17, 2048: 1.55, 8192: 1.65}  # x floor LoRA, QWEN, L=8, r=16
BATCHED = {2048: 1.18, 8192: 1.33, 16384: 1.25}  # x batched cuBLAS: base less routing, QWEN
SORT_US = ((4096, 5.0), (16384, 9.0))  # up to so many pairs, QWEN and L=8; in proportion to the pairs past the last


@dataclass(frozen=True)
class Published:
    """Microseconds of one cell in the peers' run on an H200 (4.3 TB/s, 780 TFLOP/s), all with their alignment."""

    floor_lora: float
    peer: float  # the best peer's layer with adapters
    added: float  # what vLLM's adapters add to vLLM's base
    floor_base: float = 0.0
    base: float = 0.0  # the best base layer measured, without routing


PUBLISHED = {
    (QWEN, 8, "16", 1): Published(18.1, 40.6, 78 - 34, 17.6, 24),
    (QWEN, 8, "16", 8): Published(120, 144, 184 - 135, 116, 118),
    (QWEN, 8, "16", 32): Published(251, 286, 339 - 266, 237, 247),
    (QWEN, 8, "16", 128): Published(321, 363, 458 - 303, 281, 282),
    (QWEN, 8, "16", 512): Published(344, 429, 667 - 329, 281, 304),
    (QWEN, 8, "16", 2048): Published(345, 663, 1150 - 500, 281, 440),
    (QWEN, 8, "16", 8192): Published(857, 1794, 2411 - 1407, 793, 1272),
    (QWEN, 16, "64", 32): Published(304, 337, 396 - 264, 244, 247),
    (QWEN, 16, "64", 512): Published(730, 902, 1489 - 330, 281, 308),
    (QWEN, 32, "16", 64): Published(303, 387, 387 - 302),
    (QWEN, 32, "16", 512): Published(443, 1060, 1060 - 337),
    ("qwen3-235b-a22b-tp4", 8, "16", 1): Published(18, 105, 105 - 44),
    ("qwen3-235b-a22b-tp4", 8, "16", 32): Published(253, 364, 364 - 267),
    ("qwen3-235b-a22b-tp4", 8, "16", 512): Published(382, 828, 828 - 343),
    ("mixtral-8x7b", 8, "16", 1): Published(165, 414, 414 - 192),
    ("mixtral-8x7b", 8, "16", 16): Published(668, 876, 876 - 659),
    ("mixtral-8x7b", 8, "16", 128): Published(682, 1075, 1075 - 688),
    ("mixtral-8x7b", 8, "16", 2048): Published(1877, 3513, 3701 - 3048),
}


@dataclass(frozen=True)
class Verdict:
    """One bar and what was measured against it."""

    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.limit

    def __str__(self) -> str:
        if self.met:
            return "met"
        return f"missed by {100 * (self.measured / self.limit - 1):.1f} %" if self.limit else "missed"


def verdicts(result: Result) -> list[Verdict]:
    """Every bar for which the cell has a measurement; they are promises about GPUs."""
    return list(_verdicts(result)) if result.device == "cuda" else []


def _verdicts(result: Result) -> Iterator[Verdict]:
    cell = result.cell
    yield from _layer(result)
    for name, what in (("idle", "no adapter in the batch / base"), ("unloaded", "empty pool / base")):
        ratio = result.ratio(name, "base")
        if ratio is not None:
            yield Verdict(what, IDLE, ratio)
    yield from _delta(result)
    yield from _sorts(result)
    ratio = result.ratio("lora", "compact")
    if ratio is not None:
        yield Verdict(f"pool of rank {parse_ranks(cell.ranks)[1]} / pool of the adapters' rank", RANK, ratio)
    for name, extra in result.extra_bytes.items():
        yield Verdict(f"extra memory, {name} / bound", 1.0, extra / result.extra_bound)
    if "lora" in result.host_us and cell.num_tokens <= 512:  # more keep the GPU behind, and its queue is not endless
        yield Verdict("CPU us of an eager call", HOST_US, result.host_us["lora"])


def _layer(result: Result) -> Iterator[Verdict]:
    cell, published = result.cell, _published(result.cell)
    lora, route = result.ratio("lora", result.floor_lora), result.us.get("route")
    if lora is not None and published is not None:
        ours = LAYER.get(cell.num_tokens) if (cell.shape, cell.max_loras, cell.ranks) == (QWEN, 8, "16") else None
        if ours is not None:
            yield Verdict("LoRA / floor LoRA", ours, lora)
        elif 8 <= cell.num_tokens <= 64:
            yield Verdict("LoRA / floor LoRA", OTHER_SHAPES, lora)
        yield Verdict("LoRA / floor LoRA, the best peer's", published.peer / published.floor_lora, lora)
    if route is None or "base" not in result.us:
        return
    base, batched = result.us["base"] - route, result.us.get("batched")
    if published is not None and published.base and result.floor_base:
        limit = published.base / published.floor_base
        yield Verdict("(base - routing) / floor base, the best measured", limit, base / result.floor_base)
    if batched and cell.shape == QWEN and cell.num_tokens in BATCHED and _plain(cell):
        yield Verdict("(base - routing) / batched cuBLAS", BATCHED[cell.num_tokens], base / batched)


def _delta(result: Result) -> Iterator[Verdict]:
    published, measured = _published(result.cell), result.ratio("delta", result.floor_lora)
    if published is not None and measured is not None:
        yield Verdict("delta path / floor LoRA, half of what vLLM adds", 0.5 * published.added / published.floor_lora, measured)


def _sorts(result: Result) -> Iterator[Verdict]:
    case = result.cell.case()
    if case.num_experts != 128 or case.max_loras != 8 or not _plain(result.cell):
        return
    limit = next((us for pairs, us in SORT_US if case.num_pairs <= pairs), None)
    if limit is None:
        pairs, us = SORT_US[-1]
        limit = us * case.num_pairs / pairs
    for name, what in (("align", "align, us"), ("route", "routing of the layer, us")):
        if name in result.us:
            yield Verdict(what, limit, result.us[name])


def _published(cell: Cell) -> Published | None:
    return PUBLISHED.get((cell.shape, cell.max_loras, cell.ranks, cell.num_tokens)) if _plain(cell) else None


def _plain(cell: Cell) -> bool:
    return (cell.popularity, cell.routing) == ("uniform", "uniform")
