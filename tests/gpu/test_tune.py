"""`moelora tune` and `warmup` on a GPU: a small search from end to end, and nothing compiled after a warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from moelora_ops import FusedMoEWithLoRA, LoraPool, MoeRunner
from moelora_ops.bench.cells import TINY
from moelora_ops.cli import main
from moelora_ops.kernels import config

pytestmark = pytest.mark.gpu


def test_a_small_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate compiles and runs, none is wrong, and the table, if the rule can be beaten, is valid and read back."""
    assert main(["tune", "--shapes", "tiny", "--tokens", "8", "--adapters", "4", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| tiny T=8 L=4 r=16 | " in out
    assert " x " not in out, f"something failed:\n{out}"
    problem = config.Problem(8 * TINY.top_k, TINY.num_experts, TINY.hidden_size, TINY.intermediate_size, 2, TINY.dtype)
    device = config.describe(torch.device("cuda", torch.cuda.current_device()))
    path = config.table_path("experts", problem, device, tmp_path)
    if "the rule stands everywhere" in out:
        assert not path.exists()
    else:
        tuned = config.nearest(config.read_table(path, config.Experts), problem.num_pairs)
        assert tuned is not None and config.is_valid(tuned, problem, device)
        assert main(["tune", "--shapes", "tiny", "--tokens", "8", "--adapters", "4", "--check", str(tmp_path)]) in (0, 1)
        assert "the rules take at most" in capsys.readouterr().out


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Triton was asked for and did not have."""
    found: list[str] = []

    def hook(**options: Any) -> None:
        found.append(str(options.get("repr")))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    return found


def batch(num_tokens: int) -> tuple[torch.Tensor, ...]:
    ids = torch.rand(num_tokens, 16, device="cuda").topk(4).indices.int()
    mapping = torch.randint(-1, 3, (num_tokens,), device="cuda", dtype=torch.int32)
    x = torch.randn(num_tokens + 1, 256, device="cuda", dtype=torch.bfloat16)[1:]
    return x, torch.rand(num_tokens, 4, device="cuda"), ids, mapping


def run_all(layer: MoeRunner, sizes: Any) -> None:
    for num_tokens in sizes:
        x, weights, ids, mapping = batch(num_tokens)
        layer(x, weights, ids, mapping)
        layer(x, weights, ids)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shared_outer", [0, 1])
def test_nothing_is_compiled_after_warmup(shared_outer: int, compiled: list[str]) -> None:
    """The fused layer and the layer around callables, every batch from 1 to 300 tokens, with and without adapters."""
    sizes: dict[str, Any] = dict(num_experts=16, hidden_size=256, intermediate_size=128, device="cuda")
    pool = LoraPool(1, max_loras=3, max_rank=24, shared_outer=shared_outer, **sizes)  # no other test has this rank
    w13, w2 = (torch.randn(16, 256, k, device="cuda", dtype=torch.bfloat16) for k in (256, 128))
    fused = FusedMoEWithLoRA(w13, w2, pool.layer(0))
    around = MoeRunner(
        lambda x, ids: x.new_ones(*ids.shape, 256),
        lambda h, ids: h.new_ones(*ids.shape, 256),
        num_experts=16,
        lora=pool.layer(0),
    )
    for layer in (fused, around):
        assert layer.warmup(300, top_k=4)
    assert compiled, "the hook sees nothing: this test could not fail"
    compiled.clear()
    for layer in (fused, around):
        run_all(layer, [*range(1, 70), 100, 128, 200, 256, 257, 300])
    assert compiled == []
