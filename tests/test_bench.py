"""`moelora bench`: the arithmetic of floors and targets, inputs that stay cold, and a run that fails when a value is wrong."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from moelora_ops import ops
from moelora_ops.bench import cells, floors, inputs, measure, peers, plot, report, targets
from moelora_ops.bench.cells import QWEN, Cell
from moelora_ops.bench.floors import Ceilings
from moelora_ops.bench.measure import Result
from moelora_ops.cli import main
from moelora_ops.testing import timing
from moelora_ops.testing.cases import Case, Inputs

CPU = torch.device("cpu")
TINY = ["bench", "--device", "cpu", "--shapes", "tiny"]


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 2)
    monkeypatch.setattr(measure.timing, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(measure.timing, "matmul_rate", lambda device: 1e11)


def batch_of(cell: Cell, cache: int = 0) -> list[Inputs]:
    return inputs.make_batches(inputs.Weights(CPU).of(cell), cell, cache)


def hand_batch(**changes: Any) -> Inputs:
    """Three tokens; experts 0, 1, 3; (adapter, expert) pairs (0, 0), (0, 1), (1, 3), (1, 1), and one pair of no expert."""
    case = Case("hand", num_tokens=3, num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, max_loras=2, max_lora_rank=4)
    batch = case.like(ranks=(2, 4), dtype=torch.bfloat16, **changes).make()
    return batch.replace(
        topk_ids=torch.tensor([[0, 1], [3, 1], [0, -1]], dtype=torch.int32),
        token_lora_mapping=torch.tensor([0, 1, -1], dtype=torch.int32),
    )


def test_floors_are_those_of_the_formula() -> None:
    """Three experts of (12 * 8 + 8 * 6) bf16 values; 5 pairs; adapters' bytes follow their own ranks 2 and 4."""
    expert = 2 * (12 * 8 + 8 * 6)
    flops = 2 * 5 * (12 * 8 + 8 * 6)
    ranks = 2 + 2 + 4 + 4  # of the four pairs
    adapter = ranks * 2 * ((2 * 8 + 6) + (2 * 6 + 8))  # A and B of both projections, bf16
    base, lora = floors.floor_us(hand_batch(), Ceilings(bandwidth=1e6, rate=1e12))
    assert base == pytest.approx(3 * expert) and lora == pytest.approx(3 * expert + adapter)
    base, lora = floors.floor_us(hand_batch(), Ceilings(bandwidth=1e6, rate=1e3))
    assert base == pytest.approx(flops * 1e3) and lora == pytest.approx(flops * 1e3 + adapter)


def test_floors_count_what_is_here() -> None:
    """With an expert map, the experts and the pairs of other ranks cost nothing; a disabled adapter costs nothing."""
    batch = hand_batch().replace(expert_map=torch.tensor([2, -1, -1, -1], dtype=torch.int32))
    assert inputs.expert_bytes(batch) == 2 * (12 * 8 + 8 * 6)
    assert floors.lora_bytes(batch) == 2 * 2 * 42
    assert floors.lora_bytes(batch.replace(adapter_enabled=torch.zeros(2, dtype=torch.int32))) == 0


def test_memory_bound_by_hand() -> None:
    """P * (I + H) values, 64 bytes a pair and rank, 64 a key of the sort, 64 KiB."""
    assert floors.memory_bound(hand_batch()) == 6 * (6 + 8) * 2 + 64 * 6 * 4 + 64 * 4 * 3 + 65536


def test_a_cell_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows on screen, JSON lines that hold every number and its origin, and the same rows read back."""
    path = tmp_path / "cells.jsonl"
    assert main([*TINY, "--tokens", "1,9", "--ranks", "16,4@8", "--json", str(path)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.count("\n| tiny") == 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["cell"]["num_tokens"] for line in lines] == [1, 9, 1, 9]
    for line in lines:
        assert {"device", "torch", "triton", "moelora_ops", "command", "bandwidth", "rate"} <= line["about"].keys()
        assert {"base", "lora", "idle", "unloaded", "batched", "align", "delta"} <= line["us"].keys()
        assert min(line["us"].values()) > 0 and line["spread"].keys() == line["us"].keys()
        assert 0 < line["floor_base"] < line["floor_lora"] and line["sets"] == 6
        assert line["errors"] == {} and line["cold"] is None and line["targets"] == []
    assert ["compact" in line["us"] for line in lines] == [False, False, True, True]
    assert main(["bench", "--read", str(path)]) == 0
    again = capsys.readouterr().out
    assert [row for row in again.splitlines() if row.startswith("| tiny")] == [
        row for row in out.splitlines() if row.startswith("| tiny")
    ]


def _wrong(name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace an op by one whose result or whose arguments `change` alters."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *args, **options: change(right, *args, **options))

    return plant


def _forget_adapters(op: Any, *args: Any, **options: Any) -> Any:
    return op(*args[:6], **{k: v for k, v in options.items() if k not in ("lora_ranks", "adapter_enabled")})


def _next_adapter(op: Any, *args: Any, **options: Any) -> Any:
    mapping = args[5]
    return op(*args[:5], torch.where(mapping >= 0, (mapping + 1) % 8, -1), *args[6:], **options)


def _two_percent_more_base(op: Any, *args: Any, **options: Any) -> Any:
    return op(*args, **options) * 1.02


def _none_is_slot_0(op: Any, *args: Any, **options: Any) -> Any:
    return op(*args[:5], args[5].clamp(min=0), *args[6:], **options)


def _swap_two_pairs(op: Any, *args: Any, **options: Any) -> Any:
    sorted_token_ids, *rest = op(*args, **options)
    sorted_token_ids[0] = sorted_token_ids[0].flip(0)
    return sorted_token_ids, *rest


def _up_by_gates_a(op: Any, output: Any, x: Any, lora_a: Any, *args: Any, **options: Any) -> Any:
    return op(output, x, [lora_a[0]] * len(lora_a), *args, **options)


@pytest.mark.parametrize(
    ("plant", "part"),
    [
        (_wrong("fused_experts_lora", _forget_adapters), "layer"),
        (_wrong("fused_experts_lora", _next_adapter), "layer"),
        (_wrong("fused_experts_lora", _two_percent_more_base), "layer"),
        (_wrong("fused_experts_lora", _none_is_slot_0), "layer"),
        (_wrong("moe_lora_align_block_size", _swap_two_pairs), "align"),
        (_wrong("fused_moe_lora", _up_by_gates_a), "delta"),
    ],
)
def test_a_wrong_value_fails_the_run(
    plant: Callable[[pytest.MonkeyPatch], None],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Exit code 1, a row that says which part is wrong, and no time for that part."""
    plant(monkeypatch)
    path = tmp_path / "cells.jsonl"
    assert main([*TINY, "--tokens", "40", "--json", str(path)]) == 1
    assert f"tiny T=40 L=8 r=16: {part} FAILED" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert part in result["errors"]
    assert {"layer": "base", "align": "align", "delta": "delta"}[part] not in result["us"]


def test_an_exception_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The cell that cannot be made says so; the next one is measured; the exit code is 1."""
    make = Case.make

    def broken(case: Case, *args: Any) -> Inputs:
        if case.max_loras == 3:
            raise MemoryError("no room for three")
        return make(case, *args)

    monkeypatch.setattr(Case, "make", broken)
    assert main([*TINY, "--tokens", "5", "--adapters", "3,4", "--ops", "align"]) == 1
    out = capsys.readouterr().out
    assert "tiny T=5 L=3 r=16: inputs FAILED | MemoryError: no room for three" in out
    assert "\n| tiny T=5 L=4 r=16 |" in out and "FAILED in 1 of 2 cells" in out


def test_small_sets_share_no_expert() -> None:
    """At T = 1 the weights of a set are small against an L2: each set has experts of its own until none are left."""
    cell = Cell("tiny", 1)
    weights = 2 * (256 * 256 + 256 * 128)
    batches = batch_of(cell, cache=4 * weights)
    first = torch.cat([batch.topk_ids.flatten() for batch in batches[:4]])
    assert len(first.unique()) == 16
    assert inputs.is_cold(batches[:4], cache=4 * weights) and not inputs.is_cold(batches, cache=4 * weights)
    assert inputs.is_cold(batches, cache=weights) and inputs.is_cold(batches, cache=0) is None
    assert not inputs.is_cold(batches[:4], cache=9 * weights)


def test_batches_are_distinct_and_repeatable() -> None:
    """Six different (input, routing) sets up to T = 1024, two above, the same in every run."""
    assert [inputs.num_sets(t) for t in (1, 1024, 1025)] == [6, 6, 2]
    batches, again = batch_of(Cell("tiny", 9)), batch_of(Cell("tiny", 9))
    for name in ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping"):
        values = [getattr(batch, name) for batch in batches]
        assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i]), name
        assert all(torch.equal(a, getattr(b, name)) for a, b in zip(values, again)), name


def test_popularity_and_routing_are_what_they_say() -> None:
    """identical: one adapter a set; distinct: in turn; zipf: slot 0 most often; requests of 256 above T = 512; skew."""
    slots = {p: batch_of(Cell("tiny", 400, popularity=p))[1].token_lora_mapping for p in cells.POPULARITIES}
    counts = {p: s.bincount(minlength=8) for p, s in slots.items()}
    assert counts["identical"].tolist() == [0, 400, 0, 0, 0, 0, 0, 0]
    assert counts["distinct"].tolist() == [50] * 8
    assert counts["zipf"].argmax() == 0 and counts["zipf"][0] > 2 * counts["uniform"].max()
    assert counts["uniform"].min() > 0
    long = batch_of(Cell("tiny", 600))[0].token_lora_mapping
    assert all(len(part.unique()) == 1 for part in long.split(200))  # 600 tokens are 3 requests
    load = {r: batch_of(Cell("tiny", 400, routing=r))[0].topk_ids.flatten().bincount(minlength=16) for r in cells.ROUTINGS}
    assert load["skewed"].max() > 2 * load["uniform"].max() and load["skewed"].min() < load["uniform"].min() / 2


def test_the_compact_pool_holds_the_same_adapters() -> None:
    """A pool of the adapters' own rank gives the layer the same values as the larger pool."""
    batch = batch_of(Cell("tiny", 9, max_loras=3, ranks="4+8@32"))[0]
    small = batch.replace(case=batch.case.like(max_lora_rank=8), **inputs.compacted(batch, 8))
    assert small.lora_a13.shape[2] == 16
    results = [ops.fused_experts_lora(*args, **options).float() for args, options in (batch.experts(), small.experts())]
    assert (results[0] - results[1]).abs().max() < 0.02 * results[0].abs().max()


@pytest.mark.parametrize(
    ("text", "expected"), [("16", ((16,), 16)), ("8+16+64", ((8, 16, 64), 64)), ("8@64", ((8,), 64)), ("4+8@8", ((4, 8), 8))]
)
def test_ranks_are_parsed(text: str, expected: tuple[tuple[int, ...], int]) -> None:
    """One rank, several in turn, and a pool that is larger."""
    assert cells.parse_ranks(text) == expected
    case = Cell(QWEN, 4, 5, text).case()
    ranks, pool = expected
    assert case.max_lora_rank == pool and case.ranks in ((), tuple(ranks[i % len(ranks)] for i in range(5)))


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", "16@8"],
        ["--ranks", "0"],
        ["--ranks", "a+b"],
        ["--tokens", "0"],
        ["--shapes", "gpt-5"],
        ["--popularity", "high"],
        ["--preset", "quick", "--tokens", "1"],
        ["--preset", "targets", "--device", "cpu"],
        ["--read", "pyproject.toml"],
    ],
    ids=" ".join,
)
def test_wrong_options_exit_with_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured."""
    with pytest.raises(SystemExit) as exit:
        main(["bench", *options])
    assert exit.value.code == 2 and "usage: moelora bench" in capsys.readouterr().err


def test_the_budget_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """No cell starts after the time given, and those left out are named."""
    assert main([*TINY, "--tokens", "1,2", "--seconds", "1e-9"]) == 0
    assert "left out after 0 s: tiny T=1 L=8 r=16, tiny T=2 L=8 r=16" in capsys.readouterr().out


def result_of(cell: Cell, **us: float) -> Result:
    return Result(cell, floor_base=100.0, floor_lora=200.0, us=us, extra_bound=1000)


def judged(result: Result) -> dict[str, targets.Verdict]:
    return {verdict.what: verdict for verdict in targets.verdicts(result)}


def test_layer_targets() -> None:
    """The bar of the cell, the best peer's, the best base's and cuBLAS's, each from its own ratio."""
    found = judged(result_of(Cell(QWEN, 2048), base=160.0, lora=300.0, batched=120.0, route=10.0))
    assert (found["LoRA / floor LoRA"].limit, found["LoRA / floor LoRA"].measured) == (1.55, 1.5)
    assert found["LoRA / floor LoRA, the best peer's"].limit == pytest.approx(663 / 345)
    best = found["(base - routing) / floor base, the best measured"]
    assert (best.limit, best.measured) == (pytest.approx(440 / 281), 1.5)
    assert found["(base - routing) / batched cuBLAS"].measured == 1.25
    assert [v.met for v in found.values()] == [True, True, True, False, False]
    assert found["routing of the layer, us"].limit == 9
    assert str(found["LoRA / floor LoRA"]) == "met"
    assert str(found["(base - routing) / batched cuBLAS"]) == "missed by 5.9 %"


def test_idle_rank_memory_and_host_targets() -> None:
    """Idle adapters against base, a large pool against a compact one, memory against its bound, CPU time of a call."""
    result = result_of(Cell("olmoe-1b-7b", 32, ranks="8@64"), base=100.0, idle=101.0, unloaded=102.0, lora=220.0, compact=190.0)
    result.extra_bytes, result.host_us = {"lora": 1001}, {"lora": 59.0}
    found = judged(result)
    assert {what: v.met for what, v in found.items()} == {
        "no adapter in the batch / base": True,
        "empty pool / base": False,
        "pool of rank 64 / pool of the adapters' rank": False,
        "extra memory, lora / bound": False,
        "CPU us of an eager call": True,
    }


def test_delta_target_is_half_of_what_vllm_adds() -> None:
    """Scaled by the floors: 338 µs over a floor of 344 become a bar of 0.49 floors."""
    verdict = judged(result_of(Cell(QWEN, 512), delta=90.0))["delta path / floor LoRA, half of what vLLM adds"]
    assert verdict.limit == pytest.approx(0.5 * 338 / 344) and verdict.measured == 0.45 and verdict.met


@pytest.mark.parametrize(("tokens", "limit"), [(1, 5.0), (512, 5.0), (1024, 9.0), (2048, 9.0), (8192, 36.0)])
def test_sort_targets(tokens: int, limit: float) -> None:
    """5 µs up to 4096 pairs, 9 up to 16384, in proportion after."""
    found = judged(result_of(Cell(QWEN, tokens), align=8.0, route=40.0))
    assert {v.limit for v in found.values()} == {limit}
    assert found["align, us"].met is (limit >= 8)
    assert not judged(result_of(Cell("mixtral-8x7b", tokens), align=8.0))


def test_bars_are_for_balanced_batches_on_a_gpu() -> None:
    """Another popularity has no published peer, and a CPU no promise."""
    assert "LoRA / floor LoRA" not in judged(result_of(Cell(QWEN, 32, popularity="zipf"), base=1.0, lora=1.0))
    assert judged(dataclasses.replace(result_of(Cell(QWEN, 32), base=1.0, lora=1.0), device="cpu")) == {}


def test_the_targets_preset_has_every_bar() -> None:
    """Each cell with a published peer, each row of the layer and cuBLAS bars, and pools larger than their adapters."""
    chosen = cells.preset("targets")
    keys = {(c.shape, c.max_loras, c.ranks, c.num_tokens) for c in chosen}
    assert targets.PUBLISHED.keys() <= keys
    assert {(QWEN, 8, "16", t) for t in {**targets.LAYER, **targets.BATCHED}} <= keys
    assert any("@" in c.ranks for c in chosen)
    full = cells.preset("full")
    assert full[: len(chosen)] == chosen and len(set(full)) == len(full)
    assert {c.shape for c in full} == {name for name in cells.SHAPES if name != "tiny"}


def test_the_target_table_says_by_how_much() -> None:
    """One line a bar, with its limit, the measurement, and how much it is missed by; then the sum."""
    lines = list(report.target_table([result_of(Cell(QWEN, 1), align=6.0), result_of(Cell(QWEN, 1), align=5.0)]))
    assert lines[1] == f"| {QWEN} T=1 L=8 r=16 | align, us | 5.00 | 6.000 | missed by 20.0 % |"
    assert lines[-1] == "\n1 of 2 targets met"


def test_curves_are_overhead_against_tokens(tmp_path: Path) -> None:
    """A curve for each kind of cell, in the order of T: percent over base, and times the floor."""
    results = [result_of(Cell(QWEN, t), base=100.0, lora=lora) for t, lora in ((8, 150.0), (1, 120.0))]
    results.append(result_of(Cell(QWEN, 8)))
    assert plot.curves(results) == {f"{QWEN} L=8 r=16": [(1, pytest.approx(20), 0.6), (8, pytest.approx(50), 0.75)]}
    if not plot.can_plot():
        pytest.skip("the picture itself needs matplotlib")
    plot.plot(results, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_peers_are_called_as_they_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with vLLM's and SGLang's names and arguments get the layer's tensors; a layer of another kind is refused."""
    seen: list[tuple[Any, ...]] = []

    def fused_experts(x: Any, w1: Any, w2: Any, *routing: Any, moe_runner_config: Any = None) -> None:
        seen.append(("base", w1.shape, len(routing)))

    def fused_moe_lora(
        output: Any, qcurr_hidden_states: Any, lora_a_stacked: Any, lora_b_stacked: Any, topk_weights: Any,
        sorted_token_ids: Any, expert_ids: Any, num_tokens_post_padded: Any, token_lora_mapping: Any, max_lora_rank: int,
        top_k_num: int, lora_ids: Any, num_active_loras: int, adapter_enabled: Any, shrink_block_size_m: int,
        expand_block_size_m: int, mul_routed_weight: bool = False,
    ) -> None:  # fmt: skip
        assert (
            sorted_token_ids.shape[1] == expert_ids.shape[1] * shrink_block_size_m == expert_ids.shape[1] * expand_block_size_m
        )
        assert lora_ids.tolist() == [0, 1, -1] and num_active_loras == 2
        seen.append(("delta", tuple(output.shape), len(lora_a_stacked), len(qcurr_hidden_states), mul_routed_weight))

    modules = {
        "vllm.model_executor.layers.fused_moe": types.SimpleNamespace(fused_experts=fused_experts),
        "vllm.lora.ops.triton_ops.fused_moe_lora_op": types.SimpleNamespace(
            fused_moe_lora=fused_moe_lora, _fused_moe_lora=fused_moe_lora
        ),
        "sglang.srt.layers.moe.fused_moe_triton.fused_moe": types.SimpleNamespace(fused_experts=fused_experts),
        "sglang.srt.layers.moe.moe_runner": types.SimpleNamespace(MoeRunnerConfig=lambda inplace: None),
        "sglang.srt.layers.moe.topk": types.SimpleNamespace(StandardTopKOutput=lambda *routing: routing),
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    batches = batch_of(Cell("tiny", 3, max_loras=2))[:1]
    assert peers.missing([]) == "not compared, because not importable here: vllm, sglang"
    for peer in peers.available(torch.device("cuda")):
        for function, given in peer.calls(batches).values():
            function(given[0])
    assert seen == [
        ("base", (16, 256, 256), 2),
        ("delta", (3, 4, 256), 2, 3, False),
        ("delta", (3, 4, 256), 1, 12, True),
        ("base", (16, 256, 256), 1),
    ]
    special = [batches[0].replace(case=batches[0].case.like(activation="relu2"))]
    with pytest.raises(NotImplementedError, match="plain gated SiLU"):
        peers.available(torch.device("cuda"))[0].calls(special)


def test_a_plot_without_matplotlib_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after minutes of measuring."""
    monkeypatch.setattr(plot, "can_plot", lambda: False)
    with pytest.raises(SystemExit) as exit:
        main([*TINY, "--plot", "plot.png"])
    assert exit.value.code == 2 and "matplotlib" in capsys.readouterr().err
