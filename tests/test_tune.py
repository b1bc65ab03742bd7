"""`moelora tune`: what is tried, that planted times are found and outliers are not, and the tables that come of it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
import torch

from moelora_ops.cli import main
from moelora_ops.kernels import config
from moelora_ops.kernels.config import Device, Experts, Gemm, Problem
from moelora_ops.tuning import candidates, measure, search, tables
from moelora_ops.tuning.search import Found, Layer, part

H200 = Device("H200", 227 * 1024)
TOP_K = 8


def problem(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(num_tokens * TOP_K, 128, 2048, 768, 2, dtype)


def rule(num_tokens: int) -> Experts:
    return config.experts_rule(problem(num_tokens), H200)


Cost = Callable[[str, Experts, int], float]  # (stage, configuration, tokens) -> microseconds


@dataclasses.dataclass
class FakeTimer:
    """Stages take what `cost` says, a layer the sum of its stages, with adapters or without."""

    cost: Cost
    wrong: Callable[[Experts], bool] = lambda tiles: False
    asked: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    cell: Any = None

    def stages(self, tiles: Experts, num_tokens: int, names: Sequence[str]) -> dict[str, float]:
        self.asked += [(num_tokens, name) for name in names]
        return {name: self.cost(name, tiles, num_tokens) for name in names}

    def layers(self, configs: Sequence[Experts], num_tokens: int) -> list[Layer]:
        def us(tiles: Experts) -> float:
            return sum(self.cost(stage, tiles, num_tokens) for stage in (*search.STAGES, "layer"))

        return [Layer(us(tiles) / 2, us(tiles) / 2) for tiles in configs]

    def is_right(self, tiles: Experts, num_tokens: int) -> bool:
        return not self.wrong(tiles)

    def compile(self, configs: Any) -> None:
        pass


def find(cost: Cost, num_tokens: int = 32, span: tuple[int, int] = (17, 64), **options: Any) -> Found:
    timer = FakeTimer(lambda stage, tiles, size: 0.0 if stage == "layer" else cost(stage, tiles, size), **options)
    return search.search(num_tokens, span, rule, problem(num_tokens), H200, timer)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 128, 512, 2048, 16384])
def test_candidates_are_valid_and_few(num_tokens: int) -> None:
    """Every trial runs on the device; a size has some dozens of them, none twice; the rule is the first of its kind."""
    expected = rule(num_tokens)
    families = candidates.families(expected, problem(num_tokens), H200)
    assert [family[0] for family in families if family[0].direct == expected.direct] == [expected]
    for family in families:
        assert all(config.is_valid(tiles, problem(num_tokens), H200) for tiles in family)
        assert len({tiles.direct for tiles in family}) == 1 and len(set(family)) == len(family)
    assert 8 <= sum(map(len, families)) <= 80
    assert any(family[0].direct for family in families) == (num_tokens * TOP_K <= candidates.MAX_DIRECT_PAIRS)


def test_candidates_follow_the_rows_and_the_device() -> None:
    """Few rows are tried on small tiles, many on large ones; a small GPU gets what fits, fp32 the rule alone."""

    def heights(num_tokens: int) -> set[int]:
        return {t.gate_up.block_m for f in candidates.families(rule(num_tokens), problem(num_tokens), H200) for t in f}

    assert heights(32) == {16} and heights(128) == {16, 32} and heights(8192) == {128}
    small = Device("small", 48 * 1024)
    tiles = config.experts_rule(problem(8192), small)
    for family in candidates.families(tiles, problem(8192), small):
        assert all(config.is_valid(t, problem(8192), small) for t in family)
    exact = config.experts_rule(problem(8, torch.float32), H200)
    assert candidates.families(exact, problem(8, torch.float32), H200) == [[exact]]


def test_ranges_meet_where_the_table_changes() -> None:
    """Each size belongs to the range of exactly one key: the one that a table with these keys and its bounds gives it."""
    tokens = [2, 8, 32, 128, 512]
    ranges = search.ranges(tokens)
    assert ranges[2] == (2, 4) and ranges[8] == (5, 16) and ranges[512] == (257, 1024)
    found = [Found(size, Layer(1, 1), Layer(1, 1), replace(rule(8), combine_n=16 * size), 0, 0) for size in tokens]
    table = tables.entries(found, [], TOP_K)
    for size, (low, high) in ranges.items():
        for at in (low, size, high):
            serves = config.nearest(table, at * TOP_K)
            assert serves is not None and serves.combine_n == 16 * size, (size, at)
    assert config.nearest(table, 2 * 1024 * TOP_K) is None


PLANTED = replace(
    rule(32), gate_up=Gemm(16, 32, 256, 4, 3, 1, True, 1), down=Gemm(16, 128, 128, 4, 3, 1, True, 2), combine_n=512
)  # fmt: skip


def planted(stage: str, tiles: Experts, size: int) -> float:
    """Every stage takes 10, those of PLANTED 8; without dependent launch everything takes longer."""
    if stage == "layer":
        return 0.0
    return (8.0 if part(tiles, stage) == part(PLANTED, stage) else 10.0) + (0.0 if tiles.pdl else 1.0)


def test_planted_winner_is_found() -> None:
    """The best stages are combined, though no trial had them together, and the gain is that of the layer."""
    found = find(planted)
    trials = [t for f in candidates.families(rule(32), problem(32), H200) for t in f]
    assert PLANTED not in trials
    assert found.tuned == PLANTED
    assert (found.rule.total, found.best.total) == (50 - 2 * 2, 44 - 2 * 2) or found.gain > search.NOISE
    assert found.refused == found.wrong == 0


def test_rows_of_a_block_and_splits_are_shared() -> None:
    """gate_up and down win together, with one block_m, and a shrink's splits are those that its expand sums."""

    def cost(stage: str, tiles: Experts, size: int) -> float:
        if stage == "gate_up":  # alone it would like 32 rows
            return 9.0 if tiles.gate_up.block_m == 32 else 10.0
        if stage == "down":
            return 5.0 if tiles.down.block_m == 16 and tiles.down.block_n == 128 else 10.0
        return 6.0 if stage == "shrink13" and tiles.shrink13.splits == 4 else 8.0

    tuned = find(cost, 128, (65, 256)).tuned
    assert tuned is not None and tuned.gate_up.block_m == tuned.down.block_m == 16
    tuned = find(cost).tuned
    assert tuned is not None and tuned.shrink13.splits == 4 and config.is_valid(tuned, problem(32), H200)


def test_dependent_launch_and_direct_are_tried() -> None:
    """Both ways of launching, and where pairs are few both families, by the time of the whole layer."""
    without = find(lambda stage, tiles, size: 10.0 if tiles.pdl else 9.0)
    assert without.tuned is not None and not without.tuned.pdl
    is_direct = rule(1).direct
    other = find(lambda stage, tiles, size: 1.0 if tiles.direct != is_direct else 10.0, 1, (1, 2))
    assert other.tuned is not None and other.tuned.direct != is_direct


@pytest.mark.parametrize("gain, taken", [(1.01, False), (1.019, False), (1.03, True)])
def test_a_gain_within_the_noise_leaves_the_rule(gain: float, taken: bool) -> None:
    """Less than 2 % of the layer is no reason for an entry."""
    fast = {stage: part(PLANTED, stage) for stage in search.STAGES}

    def cost(stage: str, tiles: Experts, size: int) -> float:
        everywhere = all(part(tiles, name) == form for name, form in fast.items() if name in ("gate_up", "down"))
        return 10.0 / gain if everywhere or (stage in ("gate_up", "down") and part(tiles, stage) == fast[stage]) else 10.0

    found = find(cost)
    assert (found.tuned is not None) == taken
    assert taken or (found.gain == 0 and found.best == found.rule)


@pytest.mark.parametrize("bad_at", [17, 64])
def test_outlier_at_an_end_of_the_range_is_not_chosen(bad_at: int) -> None:
    """What is fastest at the key and ten times slower where the key also serves loses to the second best."""
    second = Gemm(16, 64, 128, 4, 4, 1, True, 1)

    def cost(stage: str, tiles: Experts, size: int) -> float:
        if stage == "gate_up" and tiles.gate_up == PLANTED.gate_up:
            return 100.0 if size == bad_at else 5.0
        return 7.0 if stage == "gate_up" and tiles.gate_up == second else 10.0

    found = find(cost)
    assert found.tuned is not None and found.tuned.gate_up == second
    assert find(cost, span=(32, 32)).tuned == replace(rule(32), gate_up=PLANTED.gate_up), "without the ends it would win"


@pytest.mark.parametrize("bad_at", [17, 64])
def test_layer_that_loses_at_an_end_is_refused(bad_at: int) -> None:
    """Also when each stage alone looks well there: the whole layer decides."""
    found = find(planted)
    assert found.tuned == PLANTED

    def cost(stage: str, tiles: Experts, size: int) -> float:
        return 20.0 * (size == bad_at and tiles != rule(size)) if stage == "layer" else planted(stage, tiles, size)

    timer = FakeTimer(cost)
    found = search.search(32, (17, 64), rule, problem(32), H200, timer)
    assert found.tuned is None and found.refused >= 1 and found.gain == 0


def test_wrong_values_are_never_written() -> None:
    """A configuration that computes something else is reported, and the next best is taken."""
    found = find(planted, wrong=lambda tiles: tiles.pdl)
    assert found.wrong == 1 and (found.tuned is None or not found.tuned.pdl)
    assert find(planted, wrong=lambda tiles: True).tuned is None


def test_what_does_not_run_is_passed_over() -> None:
    """A stage that fails takes forever; when everything but the rule fails, the rule stands."""

    def cost(stage: str, tiles: Experts, size: int) -> float:
        return math.inf if part(tiles, "gate_up") != part(rule(32), "gate_up") else planted(stage, tiles, size)

    found = find(cost)
    assert found.tuned is not None and found.tuned.gate_up == rule(32).gate_up
    nothing = find(lambda stage, tiles, size: 10.0 if tiles == rule(size) else math.inf)
    assert nothing.tuned is None


def test_stages_are_timed_once_and_ends_only_for_finalists() -> None:
    """A run's length follows from the number of distinct stages, not of trials."""
    timer = FakeTimer(planted)
    search.search(32, (17, 64), rule, problem(32), H200, timer)
    trials = candidates.families(rule(32), problem(32), H200)[0]
    forms = {(stage, part(t, stage)) for t in trials for stage in search.STAGES}
    at_key = [name for size, name in timer.asked if size == 32]
    assert len(at_key) == len(forms)
    assert len(timer.asked) - len(at_key) < 2 * len(at_key) * 0.8


def test_table_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what `config.experts` then uses: entries, null for the rule, and the rule outside."""
    found = [
        Found(8, Layer(2, 2), Layer(1, 1), PLANTED, 0, 0),
        Found(32, Layer(2, 2), Layer(2, 2), None, 1, 0),
    ]
    table = tables.entries(found, [128], TOP_K)
    assert list(table) == [16, 64, 256, 1024, 4096] and list(table.values()) == [None, PLANTED, None, None, None]
    path = tables.write(table, problem(1), H200, tmp_path)
    assert path == config.table_path("experts", problem(1), H200, tmp_path)
    for cached in (config.experts, config.read_table):
        cached.cache_clear()
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    try:
        assert config.read_table(path, Experts) == table
        chosen = {size: config.experts(problem(size), H200) for size in (1, 3, 4, 8, 16, 17, 32, 128, 4096)}
        assert {size for size, tiles in chosen.items() if tiles == PLANTED} == {8, 16}
        assert all(tiles in (PLANTED, rule(size)) for size, tiles in chosen.items())
    finally:
        for cached in (config.experts, config.read_table):
            cached.cache_clear()


def test_a_table_of_nothing_is_not_written(tmp_path: Path) -> None:
    """Unless it replaces one."""
    nothing: dict[int, Experts | None] = {64: None, 256: None}
    assert tables.write(nothing, problem(1), H200, tmp_path) is None and not list(tmp_path.iterdir())
    tables.write({64: PLANTED}, problem(1), H200, tmp_path)
    path = tables.write(nothing, problem(1), H200, tmp_path)
    assert path is not None and json.loads(path.read_text()) == {"64": None, "256": None}


def test_most_sizes_make_a_dozen_keys() -> None:
    found = [Found(2**i, Layer(1, 1), Layer(1, 1), PLANTED, 0, 0) for i in range(1, tables.MOST_SIZES + 1)]
    assert len(tables.entries(found, [], TOP_K)) == tables.MOST_KEYS


@pytest.fixture
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    """The command runs to its end, with planted times instead of a GPU's."""
    pytest.importorskip("triton")
    timer = FakeTimer(planted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a fake GPU")
    monkeypatch.setattr(config, "describe", lambda device: H200)
    monkeypatch.setattr(measure, "DeviceTimer", lambda *args: timer)
    return timer


def test_the_command_writes_and_checks(on_a_fake_gpu: FakeTimer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per size, a table in --out, and --check finds the rules slower by what was planted."""
    assert main(["tune", "--tokens", "64,32", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [f"qwen3-30b-a3b T={t} L=8 r=16 | " in out for t in (32, 64, 128)] == [True, True, False], out
    path = config.table_path("experts", problem(1), H200, tmp_path)
    assert str(path) in out and config.read_table(path, Experts)[32 * TOP_K] == PLANTED
    config.read_table.cache_clear()
    assert main(["tune", "--tokens", "32", "--check", str(tmp_path)]) == 1, "13.6 % slower than the table"
    assert "the rules take at most 1.1" in capsys.readouterr().out
    assert main(["tune", "--tokens", "4096", "--check", str(tmp_path)]) == 0
    config.read_table.cache_clear()


def test_the_command_fails_on_wrong_values(on_a_fake_gpu: FakeTimer, tmp_path: Path) -> None:
    on_a_fake_gpu.wrong = lambda tiles: tiles.pdl
    assert main(["tune", "--tokens", "32", "--out", str(tmp_path)]) == 1


def test_no_size_is_started_after_the_time(
    on_a_fake_gpu: FakeTimer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--seconds", "0", "--out", str(tmp_path)]) == 0
    assert "left out after 0 s: 1, 8, 32" in capsys.readouterr().out and not on_a_fake_gpu.asked


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--shapes", "nope"], "must be of"),
        (["--tokens", "0"], "at least 1"),
        (["--tokens", ",".join(map(str, range(1, 12)))], "at most 10 numbers"),
        (["--rank", "0"], "--rank must be at least 1"),
        (["--adapters", "-1"], "--adapters must be at least 1"),
        (["--check", "nowhere"], "must be a folder"),
        (["--check", ".", "--out", "."], "excludes --out"),
        ([], "a GPU is needed"),
    ],
    ids=str,
)
def test_wrong_usage(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, and what is wrong, before anything is done."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        main(["tune", *argv])
    assert exit.value.code == 2 and message in capsys.readouterr().err
