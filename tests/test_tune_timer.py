"""What `moelora tune` runs: stages, layers and checks of tiles, and the processes that compile; in the interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import moelora_ops
from moelora_ops.bench import inputs, values
from moelora_ops.bench.cells import SHAPES, Cell
from moelora_ops.kernels.config import Experts, Gemm, Shrink
from moelora_ops.testing import timing
from moelora_ops.tuning import compiling, measure, search

TILES = Experts(
    Gemm(16, 64, 128, 4, 2), Gemm(16, 64, 128, 4, 2), Shrink(128, 1, 2, 4), Shrink(128, 1, 2, 4), segment_m=16, combine_n=256
)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3-ep8", "nemotron-3-nano", "llama-4-scout"])
def test_calls_without_memory_are_those_of_a_batch(name: str) -> None:
    """What the processes compile has the options, shapes and types of what is timed, tensor by tensor."""
    pytest.importorskip("triton")
    case = SHAPES[name].like(num_tokens=3, hidden_size=64, intermediate_size=32, max_loras=2)
    ranks = torch.full((2,), 16, dtype=torch.int32)
    batch = case.make().replace(lora_ranks=ranks, adapter_enabled=torch.ones_like(ranks))
    for adapters in (True, False):
        for field, a, b in zip(
            compiling.meta_call(case, adapters=adapters)._fields,
            compiling.meta_call(case, adapters=adapters),
            measure.call_of(batch, adapters),
        ):
            if isinstance(b, torch.Tensor):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), field
            else:
                assert a == b, field


def test_values_are_checked_by_the_configuration() -> None:
    """`check_layer` judges the functions it is given, not the op as configured."""
    case = SHAPES["tiny"].like(num_tokens=4, max_lora_rank=16)
    batch = case.make()
    right = {"base": values.calls.base, "lora": values.calls.lora}
    values.check_layer(batch, **right)
    for name in right:
        broken = {**right, name: lambda b, f=right[name]: f(b) * 1.05}
        with pytest.raises(AssertionError):
            values.check_layer(batch, **broken)


@pytest.mark.parametrize("direct", [False, True])
def test_the_timer_runs_every_stage(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages alone, layers and values of a configuration, here in Triton's interpreter; a stage that fails takes forever."""
    pytest.importorskip("triton")
    monkeypatch.setattr(timing, "REPLAYS", 1)
    monkeypatch.setattr(timing, "WARM_UPS", 0)
    monkeypatch.setattr(inputs, "num_sets", lambda num_tokens: 1)
    monkeypatch.setitem(SHAPES, "half", SHAPES["tiny"].like("half", dtype=torch.float16))  # the interpreter gets bf16 wrong
    cpu = torch.device("cpu")
    timer = measure.DeviceTimer(Cell("half", 2, 2), cpu, inputs.Weights(cpu), lambda jobs: {})  # type: ignore[arg-type]
    tiles = replace(TILES, direct=direct)
    with torch.inference_mode():
        assert timer.is_right(tiles, 2), timer.errors
        times = timer.stages(tiles, 2, search.STAGES)
        (layer,) = timer.layers([tiles], 2)
        assert timer.errors == {}
        assert list(times) == list(search.STAGES) and all(0 < us < math.inf for us in times.values())
        assert 0 < layer.base < math.inf and 0 < layer.lora < math.inf
        broken = replace(tiles, gate_up=replace(tiles.gate_up, block_n=24))
        times = timer.stages(broken, 2, ["gate_up", "combine"])
        assert times["gate_up"] == math.inf and timer.layers([broken], 2)[0].total == math.inf and timer.errors
        monkeypatch.setattr(measure, "run", lambda tiles, batch, adapters: run_wrongly(tiles, batch, adapters))
        assert not timer.is_right(tiles, 2) and any("WRONG VALUES" in message for message in timer.errors)


def run_wrongly(tiles: Experts, batch: Any, adapters: bool) -> torch.Tensor:
    args, options = batch.experts(adapters=adapters)
    return moelora_ops.fused_experts_lora(*args, **options) * (1.1 if adapters else 1.0)


def test_processes_compile_each_job_once() -> None:
    """What fails comes back as a message of its job; what was compiled is not compiled again. (In the interpreter: nothing.)"""
    pytest.importorskip("triton")
    compiler = compiling.Compiler(num_processes=1)
    good, bad = (compiling.Job(SHAPES["tiny"], TILES, True, device) for device in ("cpu", "abacus"))
    try:
        failed = compiler([good, bad, good])
        assert list(failed) == [bad] and "abacus" in failed[bad]
        assert compiler([good, bad]) == {}
    finally:
        compiler.close()
