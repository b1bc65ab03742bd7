"""Tile configurations: always one that is valid, whatever the sizes and the device, and tuned tables that only refine it."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch

from moelora_ops.kernels import config
from moelora_ops.kernels.config import Delta, Device, Experts, Gemm, Problem, Shrink

SIZES = [1, 2, 3, 7, 8, 33, 64, 100, 256, 1000, 4096, 16384, 65536]  # of pairs
DEVICES = [Device(name, kb * 1024) for name, kb in (("H200", 227), ("A100", 163), ("L40S", 99), ("T4", 64), ("small", 48))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
QWEN = Problem(num_pairs=8, num_experts=128, in_features=2048, out_features=768, num_slices=2, dtype=torch.bfloat16)
TUNED = Experts(Gemm(16, 128, 64, 4, 2), Gemm(16, 64, 64, 8, 3), Shrink(64, 2, 4, 2), Shrink(64, 1, 4, 2), 32, combine_n=512)


def problems() -> list[Problem]:
    shapes = [(128, 2048, 768), (8, 4096, 14336), (1, 1, 1), (256, 7168, 2048), (5, 37, 19)]
    return [Problem(p, *shape, slices, dtype) for p in SIZES for shape in shapes for slices in (1, 2) for dtype in DTYPES]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder instead of the shipped tables; nothing is remembered of either."""
    for cached in (config.experts, config.delta, config.read_table, config._warned):
        cached.cache_clear()
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    yield tmp_path
    for cached in (config.experts, config.delta, config.read_table, config._warned):
        cached.cache_clear()


def write_table(op: str, problem: Problem, device: Device, table: dict[str, object]) -> None:
    path = config.table_path(op, problem, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_problem_has_a_valid_configuration(device: Device) -> None:
    """Any size, dtype and device down to 48 KB of shared memory."""
    for problem in problems():
        assert config.is_valid(config.experts(problem, device), problem, device)
        assert config.is_valid(config.delta(problem, device), problem, device)


def test_rules_follow_the_rows_of_an_expert() -> None:
    """One token runs on the smallest tiles with K split, large batches on large tiles without."""
    device = DEVICES[0]
    one, many = (config.experts(dataclasses.replace(QWEN, num_pairs=p), device) for p in (8, 16384))
    assert (one.gate_up.block_m, one.shrink13.splits) == (16, 8)
    assert (many.gate_up.block_m, many.shrink13.splits) == (128, 1)


def test_number_of_configurations_is_a_small_constant() -> None:
    """All batches of 1 to 512 tokens share a handful of configurations."""
    device = DEVICES[0]
    found = {config.experts(dataclasses.replace(QWEN, num_pairs=8 * t), device) for t in range(1, 513)}
    assert len(found) <= 6


BROKEN = {
    "tile of 24": dict(gate_up=Gemm(16, 24, 64, 4, 2)),
    "tile of 8": dict(segment_m=8),
    "tile of 0": dict(combine_n=0),
    "gate_up and down walk different blocks": dict(gate_up=Gemm(32, 64, 64, 4, 2)),
    "three warps": dict(down=Gemm(16, 64, 64, 3, 3)),
    "no stage": dict(down=Gemm(16, 64, 64, 4, 0)),
    "no split": dict(shrink13=Shrink(64, 0, 4, 2)),
    "too much shared memory": dict(gate_up=Gemm(16, 128, 256, 4, 4)),
    "too many registers": dict(gate_up=Gemm(128, 256, 16, 8, 1), down=Gemm(128, 16, 16, 4, 1)),
    "a sum of splits feeds WGMMA": dict(gate_up=Gemm(64, 64, 64, 4, 2), down=Gemm(64, 64, 64, 4, 2)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_invalid_configurations_are_recognised(what: str) -> None:
    """Each way of not compiling or not fitting is seen by `is_valid`."""
    assert config.is_valid(TUNED, QWEN, DEVICES[0])
    assert not config.is_valid(dataclasses.replace(TUNED, **BROKEN[what]), QWEN, DEVICES[0])


def test_a_tail_must_have_the_bits_of_its_repetition() -> None:
    """On tensor cores of another kind than the whole blocks', which do a tile again, it would not."""
    whole, shrink = Gemm(64, 64, 64, 4, 2), Shrink(64, 1, 4, 2)
    tiles = dataclasses.replace(TUNED, gate_up=whole, down=whole, shrink13=shrink, shrink2=shrink)
    assert config.is_valid(tiles, QWEN, DEVICES[0])
    assert not config.is_valid(dataclasses.replace(tiles, down=dataclasses.replace(whole, tail_m=32)), QWEN, DEVICES[0])


def test_kernels_of_few_pairs_must_fit_too() -> None:
    """Of a pool of rank 64: its shrink takes 108 KB with four stages, down 138 KB with the 448 sums of a fused shrink."""
    device, gemm, shrink = DEVICES[2], Gemm(16, 32, 128, 4, 2, tma=True, expand_stages=1), Shrink(128, 1, 2, 2)
    direct = Experts(gemm, gemm, shrink, shrink, 16, combine_n=256, direct=True)
    fused, wide = dataclasses.replace(direct, fuse_shrink2=True), dataclasses.replace(QWEN, out_features=14336)
    assert config.is_valid(direct, wide, device) and config.is_valid(fused, QWEN, device)
    assert not config.is_valid(fused, wide, device)
    assert not config.is_valid(dataclasses.replace(direct, shrink13=Shrink(128, 1, 2, 4)), QWEN, device)


def test_tuned_table_is_used(tables: Path) -> None:
    """The nearest key in the logarithm serves; its values are the fields of the dataclass."""
    device, other = DEVICES[0], dataclasses.replace(TUNED, combine_n=1024)
    write_table("experts", QWEN, device, {"8": dataclasses.asdict(TUNED), "4096": dataclasses.asdict(other)})
    chosen = [config.experts(dataclasses.replace(QWEN, num_pairs=p), device) for p in (1, 8, 180, 182, 10**6)]
    assert chosen == [TUNED, TUNED, TUNED, other, other]
    assert config.experts(dataclasses.replace(QWEN, num_experts=64), device) != TUNED, "another shape has another table"


def test_tuned_delta_table_is_used(tables: Path) -> None:
    """The same for the delta op."""
    tuned = Delta(Shrink(64, 2, 2, 2), 64, 32, expand_n=64, expand_tiles=2, expand_warps=2, expand_stages=3)
    write_table("delta", QWEN, DEVICES[0], {"64": dataclasses.asdict(tuned)})
    assert config.delta(QWEN, DEVICES[0]) == tuned


def test_tuned_entry_that_does_not_fit_is_passed_over(tables: Path) -> None:
    """A table made for more shared memory falls back to the rules."""
    device = DEVICES[-1]
    large = dataclasses.replace(TUNED, gate_up=Gemm(16, 128, 128, 4, 4))
    write_table("experts", QWEN, device, {"8": dataclasses.asdict(large)})
    with pytest.warns(UserWarning, match=re.escape(str(config.table_path("experts", QWEN, device)))):
        assert config.experts(QWEN, device) == config.experts_rule(QWEN, device)


def test_null_leaves_a_size_to_the_rule(tables: Path) -> None:
    """An entry serves up to half way to a neighbour that says null."""
    write_table("experts", QWEN, DEVICES[0], {"8": dataclasses.asdict(TUNED), "128": None})
    problems = [dataclasses.replace(QWEN, num_pairs=p) for p in (1, 32, 33, 10**6)]
    chosen = [config.experts(p, DEVICES[0]) for p in problems]
    assert chosen == [TUNED, TUNED, *(config.experts_rule(p, DEVICES[0]) for p in problems[2:])]


GOOD = dataclasses.asdict(TUNED)
BAD_TABLES = {
    "not JSON": "{",
    "a list": "[]",
    "a key that is no number": json.dumps({"eight": GOOD}),
    "an unknown field": json.dumps({"8": GOOD, "64": {**GOOD, "block_q": 16}}),
    "an unknown field inside": json.dumps({"8": {**GOOD, "down": {**GOOD["down"], "bloc_m": 16}}}),
    "a missing field": json.dumps({"8": {k: v for k, v in GOOD.items() if k != "down"}}),
    "a number as text": json.dumps({"8": {**GOOD, "combine_n": "512"}}),
    "a flag as a number": json.dumps({"8": {**GOOD, "pdl": 1}}),
    "no configuration": json.dumps({"8": 16}),
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_a_bad_table_is_refused_once_and_aloud(what: str, tables: Path) -> None:
    """The rules serve every size, and one warning names the file."""
    path = config.table_path("experts", QWEN, DEVICES[0])
    path.parent.mkdir(parents=True)
    path.write_text(BAD_TABLES[what])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for pairs in (8, 64, 512):
            problem = dataclasses.replace(QWEN, num_pairs=pairs)
            assert config.experts(problem, DEVICES[0]) == config.experts_rule(problem, DEVICES[0])
    assert [str(path) in str(w.message) for w in caught] == [True]


def test_shipped_tables_are_valid() -> None:
    """Every table in the package can be read, and its entries run on the device they name."""
    for path in config.CONFIGS.rglob("*.json"):
        sizes = dict(part.split("=") for part in path.stem.split(","))
        table: Any = config.read_table(path, {"experts": Experts, "delta": Delta}[path.parent.name])
        assert 0 < len(table) <= 12, path
        for pairs, entry in table.items():
            numbers = (int(sizes[letter]) for letter in "EHIS")
            problem = Problem(pairs, *numbers, getattr(torch, sizes["dtype"]))
            assert entry is None or config.is_valid(entry, problem, Device(sizes["device"], 227 * 1024)), path


@pytest.mark.parametrize("max_rank, ranks", [(1, 16), (16, 16), (17, 32), (64, 32), (256, 32)])
def test_rank_tile(max_rank: int, ranks: int) -> None:
    """16 where the pool's rank allows, else 32: a tile is computed whole, so small adapters in large pools stay cheap."""
    assert config.block_r(max_rank) == ranks
