"""`MoeRunner.warmup`: what it runs, and that afterwards no batch compiles anything.

The second is shown without a GPU, by the keys under which Triton keeps what it compiled, of every launch on meta tensors (this
file as a script, in a process without Triton's interpreter).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelora_ops import FusedMoEWithLoRA, LoraPool, MoeRunner, layers
from moelora_ops.kernels import config
from moelora_ops.kernels.config import Device, Problem

H200 = Device("H200", 227 * 1024)
SIZES = dict(num_experts=4, hidden_size=32, intermediate_size=16)
LAYER_MOST, DELTA_MOST = 40, 20  # compiled variants of all kernels of an op, over T = 1 to 512: 30 and 14 today


@pytest.fixture
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU believe that something is compiled there."""
    monkeypatch.setattr(layers, "_compiles", lambda device: True)
    monkeypatch.setattr(config, "describe", lambda device: H200)


def weights(**options: Any) -> FusedMoEWithLoRA:
    return FusedMoEWithLoRA(torch.randn(4, 32, 32), torch.randn(4, 32, 16), **options)


def pool(dtype: torch.dtype = torch.float32, **options: Any) -> LoraPool:
    return LoraPool(1, max_loras=2, max_rank=8, dtype=dtype, **SIZES, **options)


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, bool, torch.dtype, torch.dtype]]:
    """(tokens, with adapters, dtypes of ids and mapping) of every call of one of a runner's two ways."""
    seen = []
    right = getattr(MoeRunner, name)

    def record(self: MoeRunner, x: Tensor, w: Tensor, ids: Tensor, mapping: Tensor, lora: Any) -> Tensor:
        seen.append((len(x), lora is not None, ids.dtype, mapping.dtype))
        assert x.shape == (len(ids), 32) and w.dtype == torch.float32
        out: Tensor = right(self, x, w, ids, mapping, lora)
        assert out.shape == x.shape
        return out

    monkeypatch.setattr(MoeRunner, name, record)
    return seen


def test_every_configuration_runs_with_adapters_and_without(on_a_fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch for each configuration of 1 to max_tokens, in the dtypes of the ids that will come."""
    seen = calls_of(monkeypatch, "_fused")
    layer = weights(lora=pool().layer(0))
    layer.lora_enabled = False  # may be switched on later
    sizes = layer.warmup(300, top_k=2, ids_dtype=torch.int64)
    chosen = [config.experts(Problem(2 * t, 4, 32, 16, 2, torch.float32), H200) for t in range(1, 301)]
    assert len(sizes) == len(set(chosen)) and {chosen[t - 1] for t in sizes} == set(chosen)
    assert {(t, lora) for t, lora, *_ in seen} == {(t, lora) for t in sizes for lora in (True, False)}
    assert {dtypes for *_, ids, mapping in seen for dtypes in [(ids, mapping)]} == {(torch.int64, torch.int32)}


def test_without_adapters_and_with_an_expert_map(on_a_fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without a pool runs the base alone; ids go as far as the map does."""
    seen = calls_of(monkeypatch, "_fused")
    assert weights().warmup(4, top_k=2) and not any(lora for _, lora, *_ in seen)
    layer = weights(expert_map=torch.tensor([-1, 0, 1, -1, 2, 3]))
    assert layer.warmup(4, top_k=6)
    with pytest.raises(ValueError, match="top_k must be <= the number of experts, 6, got 7"):
        layer.warmup(4, top_k=7)


@pytest.mark.parametrize("shared_outer", [False, True, 1])
def test_callables(shared_outer: bool | int, on_a_fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around foreign GEMMs the configurations are those of the delta op; without a pool nothing is ours."""
    seen = calls_of(monkeypatch, "_around_callables")

    def gate_up(x: Tensor, ids: Tensor) -> Tensor:
        return x.new_zeros(*ids.shape, 32)

    def down(h: Tensor, ids: Tensor) -> Tensor:
        return h.new_zeros(*ids.shape, 32)

    runner = MoeRunner(gate_up, down, num_experts=4, lora=pool(torch.bfloat16, shared_outer=shared_outer).layer(0))
    sizes = runner.warmup(200, top_k=2)
    chosen = {
        (
            config.delta(Problem(2 * t, 4, 32, 16, 2, torch.float32), H200),
            config.delta(Problem(2 * t, 4, 16, 32, 1, torch.bfloat16), H200),
        )
        for t in range(1, 201)
    }
    assert len(sizes) == len(chosen) > 1
    assert [(t, lora) for t, lora, *_ in seen] == [(t, lora) for t in reversed(sizes) for lora in (False, True)]
    assert MoeRunner(gate_up, down, num_experts=4).warmup(200, top_k=2) == []


def test_nothing_runs_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls_of(monkeypatch, "_fused")
    assert weights(lora=pool().layer(0)).warmup(300, top_k=2) == [] and seen == []


def test_warmup_changes_nothing(on_a_fake_gpu: None) -> None:
    """The pool and what the layer computes are as before."""
    layer = weights(lora=pool().layer(0))
    args = (torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.tensor([0, -1, 1]))
    before = layer(*args)
    layer.warmup(8, top_k=2)
    assert torch.equal(layer(*args), before)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(max_tokens=0, top_k=2), ValueError, "max_tokens must be >= 1, got 0"),
        (dict(max_tokens=4, top_k=0), ValueError, "top_k must be >= 1, got 0"),
        (dict(max_tokens=4.0, top_k=2), TypeError, "max_tokens must be an int, got float"),
        (dict(max_tokens=4, top_k=5), ValueError, "top_k must be <= the number of experts, 4, got 5"),
        (dict(max_tokens=4, top_k=2, ids_dtype=torch.int16), TypeError, "ids_dtype must be int32 or int64"),
        (dict(max_tokens=4, top_k=2, mapping_dtype=torch.float32), TypeError, "mapping_dtype must be int32 or int64"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Bad arguments are named, also where nothing would be compiled."""
    with pytest.raises(error, match=message):
        weights().warmup(**options)


@pytest.mark.parametrize("op", ["layer", "delta"])
def test_after_warmup_no_batch_compiles(op: str) -> None:
    """The kernels of the few sizes that warmup runs are those of every size from 1 to 512, and few.

    Whatever a launch is specialised on is in its key: an argument that changed it with T would show. Batches come as views that
    begin anywhere, and a batch of one token with whatever stride.
    """
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, op]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["missing"] == {}, "compiled at run time after a warm-up"
    assert 0 < sum(report["variants"].values()) <= {"layer": LAYER_MOST, "delta": DELTA_MOST}[op], report


def _report(op: str) -> dict[str, Any]:
    import test_triton_aot as aot
    import triton

    from moelora_ops.kernels.triton import experts
    from moelora_ops.testing.cases import MODELS
    from moelora_ops.tuning.compiling import meta_call

    aot._target(90)
    found: dict[str, set[str]] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def hook(*, key: Any, **_: Any) -> bool:
            found.setdefault(self.fn.__name__, set()).add(str(key))
            return True

        triton.knobs.runtime.jit_cache_hook = hook
        run(self, *args, grid=grid, warmup=True, **kwargs)

    run, triton.JITFunction.run = triton.JITFunction.run, record
    cuda = torch.device("cuda", 0)
    device = config.describe(cuda)
    up, down = ((128, *sizes, torch.bfloat16) for sizes in ((2048, 768, 2), (768, 2048, 1)))

    def configuration(num_tokens: int) -> Any:
        first, second = Problem(8 * num_tokens, *up), Problem(8 * num_tokens, *down)
        return config.experts(first, device) if op == "layer" else (config.delta(first, device), config.delta(second, device))

    def call(num_tokens: int, start: int = 0) -> None:
        if op == "delta":
            experts.fused_experts_lora = lambda *_, **__: None  # type: ignore[assignment]
            aot._call_both_ops(num_tokens, torch.bfloat16, "qwen", 16, start=start)
            return
        for adapters in (True, False):
            made = meta_call(MODELS["qwen3-30b-a3b"].like(num_tokens=start + num_tokens), adapters=adapters)
            batch = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")
            made = made._replace(**{name: getattr(made, name)[start:] for name in batch})
            experts.make_plan(made, device=cuda)
            if num_tokens == 1 and start:
                row = torch.empty_strided((1, 2048), (1, 1), dtype=torch.bfloat16, device="meta")
                experts.make_plan(made._replace(hidden_states=row), device=cuda)

    for num_tokens in config.first_sizes(configuration, 512):
        call(num_tokens)
    warm = {name: set(keys) for name, keys in found.items()}
    for num_tokens in range(1, 513):
        call(num_tokens, start=num_tokens % 3)
    missing = {name: len(keys - warm.get(name, set())) for name, keys in found.items()}
    return {
        "variants": {name: len(keys) for name, keys in warm.items()},
        "missing": {name: count for name, count in missing.items() if count},
    }


if __name__ == "__main__":
    print(json.dumps(_report(sys.argv[1])))
