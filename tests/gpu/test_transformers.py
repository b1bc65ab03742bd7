"""transformers models on a GPU: eager rows, CUDA graphs of torch.compile and by hand, moves from the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")
pytest.importorskip("peft", reason="needs peft to write adapters and to merge them")

RANKS = {"a": 2, "b": 5, "c": 8}
ROWS: list[str | None] = ["b", None, "a", "c"]


@pytest.fixture(scope="module")
def tiny() -> Any:
    """examples/mixed_adapters.py."""
    path = Path(__file__).resolve().parents[2] / "examples" / "mixed_adapters.py"
    spec = importlib.util.spec_from_file_location("mixed_adapters", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def make(tiny: Any, name: str, folder: Path, device: str = "cuda") -> tuple[Any, Any, dict[str | None, Any]]:
    """A model with adapters loaded, what loads them, and PEFT's merged models."""
    from moelora_ops.integrations.transformers import enable

    model = tiny.make_model(name).to(device)
    merged = {None: model, **{a: tiny.make_adapter(model, folder / a, rank, seed=rank) for a, rank in RANKS.items()}}
    enabled = enable(model, max_loras=4, max_rank=16)
    for adapter in RANKS:
        enabled.load(folder / adapter, adapter)
    return model, enabled, merged


def prompts(batch: int, length: int = 7) -> Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(batch)).cuda()


def check_rows(got: Tensor, base: Tensor, merged: dict[str | None, Any], ids: Tensor, rows: list[str | None]) -> None:
    for row, name in enumerate(rows):
        if name is None:
            assert torch.equal(got[row], base[row]), f"row {row}"
            continue
        expected = merged[name](ids[row : row + 1]).logits[0]
        effect = (expected - base[row]).norm()
        assert effect > 0.2 * expected.norm()
        assert (got[row] - expected).norm() < 1e-3 * effect, f"row {row}: {name}"


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_rows_are_what_peft_makes_of_them(tiny: Any, tmp_path: Path, name: str) -> None:
    """fp32 logits of a mixed batch, and base rows with the bits of the model without adapters."""
    model, enabled, merged = make(tiny, name, tmp_path)
    ids = prompts(4)
    base = model(ids).logits
    with enabled.adapters(ROWS):
        check_rows(model(ids).logits, base, merged, ids, ROWS)


def test_moved_and_cast(tiny: Any, tmp_path: Path) -> None:
    """Enabled and loaded on the CPU, then moved and cast: the adapters go along."""
    model, enabled, merged = make(tiny, "gpt_oss", tmp_path, device="cpu")
    model.to("cuda")
    for alone in merged.values():
        alone.to("cuda")
    ids = prompts(4)
    base = model(ids).logits
    with enabled.adapters(ROWS):
        exact = model(ids).logits
        check_rows(exact, base, merged, ids, ROWS)
    model.to(torch.bfloat16)
    with enabled.adapters(ROWS):
        got = model(ids).logits
    assert got.dtype == torch.bfloat16 and (got - exact).norm() < 0.1 * (exact - base).norm()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generate(tiny: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Greedy, beams, and the static cache, whose decode step transformers compiles by itself."""
    model, enabled, merged = make(tiny, "qwen3_moe", tmp_path)
    ids = prompts(4)
    with enabled.adapters(ROWS):
        got = model.generate(ids, max_new_tokens=6, do_sample=False, **settings)
    enabled.close()
    for row, name in enumerate(ROWS):
        alone = merged[name].generate(
            ids[row : row + 1], max_new_tokens=6, do_sample=False, num_beams=settings.get("num_beams", 1)
        )
        assert torch.equal(got[row], alone[0]), f"row {row}: {name}"


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_reduce_overhead(tiny: Any, tmp_path: Path, name: str) -> None:
    """torch.compile's CUDA graphs follow loads, swaps and other choices, without another recording or compilation."""
    model, enabled, merged = make(tiny, name, tmp_path)
    for adapter in RANKS:
        enabled.unload(adapter)
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids = prompts(4)

    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(input_ids=ids, use_cache=False).logits.clone()

    for _ in range(3):  # warm-up, recording, replay: all before any adapter is there
        base = run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for adapter in RANKS:
            enabled.load(tmp_path / adapter, adapter)
        for rows in (ROWS, [None, "c", "b", None], ["a"] * 4):
            with enabled.adapters(rows):
                check_rows(run(), base, merged, ids, rows)
        enabled.load(tmp_path / "a", "c")  # in place
        with enabled.adapters(["c", None, "c", "b"]):
            check_rows(run(), base, merged, ids, ["a", None, "a", "b"])
        enabled.unload("b")
        assert torch.equal(run(), base)


def test_captured_by_hand(tiny: Any, tmp_path: Path, capture: Any) -> None:
    """A graph captured without any adapter holds experts and linear layers of those that come later; memory poisoned."""
    model, enabled, merged = make(tiny, "qwen3_moe", tmp_path)
    for adapter in RANKS:
        enabled.unload(adapter)
    ids = prompts(4)
    mask = torch.ones(7, 7, dtype=torch.bool, device="cuda").tril().expand(4, 1, 7, 7)
    place = torch.arange(7, device="cuda").expand(4, 7)
    graph = capture(lambda: model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits)
    base = graph.replay()
    for adapter in RANKS:
        enabled.load(tmp_path / adapter, adapter)
    for rows in (ROWS, ["c", "c", None, "a"]):
        with enabled.adapters(rows):
            check_rows(graph.replay(), base, merged, ids, rows)
    assert torch.equal(graph.replay(), base)


def test_no_second_copy_of_transposed_weights(tiny: Any) -> None:
    """gpt-oss on the device: laying weights out leaves the memory as it was, with one parameter twice at the peak."""
    from moelora_ops.integrations.transformers import enable

    config = transformers.AutoConfig.for_model(
        "gpt_oss", **{**tiny.SIZES, **tiny.MODELS["gpt_oss"], "hidden_size": 1024, "intermediate_size": 1024}
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    largest = max(p.nbytes for p in model.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    enabled = enable(model, max_loras=1, max_rank=1, linears=())
    pool = sum(t.nbytes for layer in range(2) for t in vars(enabled.pool.layer(layer)).values() if isinstance(t, Tensor))
    assert torch.cuda.memory_allocated() - before < pool + 2**20
    assert torch.cuda.max_memory_allocated() - before < pool + largest + 2**20
