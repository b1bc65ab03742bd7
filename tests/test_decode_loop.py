"""examples/decode_loop.py runs on a CPU: three rows per batch, one graph with LoRA and one without, swaps seen by neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "decode_loop.py"


@pytest.fixture
def example() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("decode_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_decode_loop(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row has numbers, the graphs are two whatever is loaded, and a swap changes the tokens of its own sequences only."""
    sizes = "--layers 2 --hidden 64 --intermediate 32 --experts 8 --heads 2 --kv-heads 1 --head-dim 16 --vocabulary 512"
    example.main(f"{sizes} --adapters 3 --rank 8 --batch 1 6 --steps 8 --backend aot_eager".split())
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")][2:]
    assert [(row[0], row[1]) for row in rows] == [(batch, row) for batch in ("1", "6") for row in example.ROWS]
    assert all(int(row[column].replace(",", "")) > 0 for row in rows for column in (2, 3))
    assert "no CUDA graphs: this machine has no GPU" in out or all(row[4] != "-" for row in rows)
    assert "graphs compiled for all of this: 2; and after another adapter was loaded into slot 0: 2" in out
    assert "its sequences end with other tokens now: True" in out
    assert "all others with the same: True" in out
