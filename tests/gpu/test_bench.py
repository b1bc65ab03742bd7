"""`moelora bench` on a GPU: graphs, launches, memory and host time are there, and cold means cold."""

import json
from pathlib import Path

import pytest
import torch

from moelora_ops.bench import inputs
from moelora_ops.bench.cells import QWEN, Cell
from moelora_ops.cli import main
from moelora_ops.testing import timing

pytestmark = pytest.mark.gpu


def test_a_cell_is_measured_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number of a GPU row, for a pool that is larger than its adapters."""
    path = tmp_path / "cells.jsonl"
    options = ["--shapes", "tiny", "--tokens", "1,64", "--ranks", "8@32", "--json", str(path)]
    assert main(["bench", *options]) == 0, capsys.readouterr().out
    for line in map(json.loads, path.read_text().splitlines()):
        names = {"base", "lora", "idle", "unloaded", "batched", "compact", "align", "route", "delta"}
        assert names <= line["us"].keys() and min(line["us"].values()) > 0
        assert 3 <= line["launches"]["base"] <= line["launches"]["lora"] <= 12
        assert line["extra_bytes"]["lora"] > 0 and line["host_us"]["lora"] > 0
        assert line["targets"]


def test_launches_and_bytes_of_known_calls() -> None:
    """Two kernels are two launches; a temporary counts, an input and the result do not."""
    x = torch.ones(1024, 1024, device="cuda")
    assert timing.num_launches(lambda: (x + 1) * 2) in (2, None)
    assert timing.extra_bytes(lambda: (x + 1) * 2) == x.numel() * 4


def test_sets_of_one_token_are_cold() -> None:
    """Six sets of one token of a real model share no expert, and together exceed this device's L2."""
    device = torch.device("cuda")
    cache = timing.cache_bytes(device)
    cell = Cell(QWEN, 1)
    batches = inputs.make_batches(inputs.Weights(device).of(cell), cell, cache)
    experts = torch.cat([inputs.active_experts(batch) for batch in batches])
    assert len(experts.unique()) == len(experts) == 48 and inputs.is_cold(batches, cache)
