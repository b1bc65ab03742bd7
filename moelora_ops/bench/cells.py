"""What is measured: a cell is a layer's shape, a batch size and a pool of adapters; a preset is a list of cells."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch

from ..testing.cases import MODELS, Case

TINY = Case("tiny", hidden_size=256, intermediate_size=128, num_experts=16, top_k=4, dtype=torch.bfloat16)  # for CPUs and tests
SHAPES = {**MODELS, TINY.name: TINY}
QWEN = "qwen3-30b-a3b"

POPULARITIES = {"uniform": "uniform", "distinct": "distinct", "zipf": "zipf", "identical": "one"}  # to Case.adapters
ROUTINGS = {"uniform": "uniform", "skewed": "zipf"}  # to Case.experts


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    `ranks` is one rank, several joined by "+" that the slots take in turn, and after "@" the pool's rank where it is larger
    than all of them: "16", "8+16+64", "8@64".
    """

    shape: str
    num_tokens: int
    max_loras: int = 8
    ranks: str = "16"
    popularity: str = "uniform"
    routing: str = "uniform"

    def __str__(self) -> str:
        special = [word for word in (self.popularity, self.routing) if word != "uniform"]
        return " ".join([self.shape, f"T={self.num_tokens}", f"L={self.max_loras}", f"r={self.ranks}", *special])

    def case(self) -> Case:
        """The cell's sizes for `testing.cases`."""
        ranks, pool = parse_ranks(self.ranks)
        slots = tuple(itertools.islice(itertools.cycle(ranks), self.max_loras))
        return SHAPES[self.shape].like(
            num_tokens=self.num_tokens,
            max_loras=self.max_loras,
            max_lora_rank=pool,
            ranks=() if set(slots) == {pool} else slots,
            adapters=POPULARITIES[self.popularity],
            experts=ROUTINGS[self.routing],
        )


def parse_ranks(text: str) -> tuple[tuple[int, ...], int]:
    """Ranks that the slots take in turn, and the pool's rank.

    >>> parse_ranks("8+16@64")
    ((8, 16), 64)
    """
    names, _, pool_name = text.partition("@")
    try:
        ranks = tuple(int(name) for name in names.split("+"))
        pool = int(pool_name) if pool_name else max(ranks)
    except ValueError:
        raise ValueError(f"ranks must look like 16, 8+16+64 or 8@64, got {text!r}") from None
    if min(ranks) < 1 or pool < max(ranks):
        raise ValueError(f"ranks must be at least 1 and at most the pool's, got {text!r}")
    return ranks, pool


def grid(
    shapes: Sequence[str],
    tokens: Sequence[int],
    adapters: Sequence[int] = (8,),
    ranks: Sequence[str] = ("16",),
    popularities: Sequence[str] = ("uniform",),
    routings: Sequence[str] = ("uniform",),
) -> Iterator[Cell]:
    """Every combination, the shape varying slowest."""
    for shape, loras, rank, popularity, routing, num_tokens in itertools.product(
        shapes, adapters, ranks, popularities, routings, tokens
    ):
        yield Cell(shape, num_tokens, loras, rank, popularity, routing)


def preset(name: str) -> list[Cell]:
    """The cells of "quick", "targets" or "full", the most telling first."""
    return list(dict.fromkeys(_PRESETS[name]()))


def _quick() -> Iterator[Cell]:
    yield from grid([QWEN], [1, 8, 32, 128, 512])


def _targets() -> Iterator[Cell]:
    """The cells for which performance has a bar: see `targets`."""
    yield from grid([QWEN], [1, 8, 32, 128, 512, 2048, 8192, 16384])
    yield from grid([QWEN], [32, 512], [16], ["64"])
    yield from grid([QWEN], [64, 512], [32])
    yield from grid(["qwen3-235b-a22b-tp4"], [1, 32, 512])
    yield from grid(["mixtral-8x7b"], [1, 16, 128, 2048])
    yield from grid([QWEN], [32, 512, 2048], [8], ["8@64"])


def _full() -> Iterator[Cell]:
    """Everything that users asked about; cells with a bar first, then other models, then other pools and batches."""
    yield from _targets()
    others = [name for name in MODELS if name != QWEN]
    for tokens in (32, 512, 1, 2048, 8, 128, 8192):
        yield from grid(others, [tokens])
    yield from grid([QWEN], [512, 32], [8], ["8+16+64", "8", "32", "64", "128"])
    yield from grid([QWEN], [512, 32], [1, 4, 16, 64])
    yield from grid([QWEN], [512, 32], popularities=["distinct", "zipf", "identical"])
    yield from grid([QWEN], [32, 512, 2048, 8192], routings=["skewed"])
    yield from grid([QWEN], [2, 4, 16, 64, 256, 1024, 4096])
    yield from grid([QWEN], [32], [64], ["128"])
    yield from grid(others, [16384])


def _tiny() -> Iterator[Cell]:
    yield from grid([TINY.name], [1, 8, 64])
    yield from grid([TINY.name], [8], [4], ["8+16@32"], ["zipf"], ["skewed"])


_PRESETS = {"quick": _quick, "targets": _targets, "full": _full, "tiny": _tiny}
