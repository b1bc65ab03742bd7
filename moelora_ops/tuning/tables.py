"""Tuned tables on disk, as `kernels.config` reads them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Sequence

from ..kernels import config
from ..kernels.config import Device, Experts, Problem
from .search import Found

MOST_KEYS = 12  # each may be two compiled variants of every stage
MOST_SIZES = MOST_KEYS - 2


def entries(found: Sequence[Found], left_out: Sequence[int], top_k: int) -> dict[int, Experts | None]:
    """The table of a search: by number of pairs, None where the rule stands.

    It also stands for what was left out and outside of what was measured: the outermost keys say so, at such a distance that
    the sizes next to them serve half, and twice, themselves (`search.ranges`).
    """
    table: dict[int, Experts | None] = {f.num_tokens * top_k: f.tuned for f in found}
    table |= dict.fromkeys((size * top_k for size in left_out), None)
    if not table:
        return {}
    low, high = min(table), max(table)
    if low // 4 >= 1 and low > top_k:
        table[low // 4] = None
    table[4 * high] = None
    return dict(sorted(table.items()))


def write(table: dict[int, Experts | None], problem: Problem, device: Device, folder: Path | None) -> Path | None:
    """Write a table that says more than "the rule", or that replaces another one; where it lies.

    Args: folder: instead of the package's own, where it is in force from the next process on.
    """
    path = config.table_path("experts", problem, device, folder)
    if not any(table.values()) and not path.exists():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {str(key): None if tiles is None else dataclasses.asdict(tiles) for key, tiles in table.items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in data.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path
