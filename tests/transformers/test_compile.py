"""A transformers model compiled and captured: adapters never recompile it, and are always followed."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moelora_ops.testing.capture import FakeGraph

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_module(model: Any) -> Any:
    return model


def as_forward(model: Any) -> Any:
    return model.forward


def as_part(model: Any) -> Any:
    return lambda **inputs: model(**inputs)


def compiled(model: Any, way: Callable[[Any], Any], backend: str) -> tuple[Callable[[Tensor], Tensor], Any]:
    counter = CompileCounterWithBackend(backend)
    function = torch.compile(way(model), backend=counter, fullgraph=True)
    return lambda ids: function(input_ids=ids, use_cache=False).logits, counter


def eager(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


CASES = {
    "qwen3_moe, its forward": ("qwen3_moe", as_forward, "aot_eager"),
    "gpt_oss as a module": ("gpt_oss", as_module, "eager"),
    "mixtral inside a function": ("mixtral", as_part, "eager"),
    "deepseek_v3 as a module": ("deepseek_v3", as_module, "eager"),
}


@pytest.mark.parametrize(("family", "way", "backend"), CASES.values(), ids=CASES.keys(), indirect=["family"])
def test_loads_and_choices_never_recompile(family: Any, way: Callable[[Any], Any], backend: str) -> None:
    """Compiled before any adapter was there: once for a batch size, once more for all others, and never for adapters."""
    enabled = family.enable()
    run, counter = compiled(family.model, way, backend)

    def check(batch: int, length: int, names: Any) -> None:
        ids = family.prompts(batch, length)
        base = eager(family.model, ids)
        with enabled.adapters(names):
            expected, got = eager(family.model, ids), run(ids)
        for row in range(batch):
            name = names if names is None or isinstance(names, str) else names[row]
            effect = (expected[row] - base[row]).norm()
            assert (effect > 0.2 * base[row].norm()) == (name is not None)
            scale = expected[row].norm() if name is None else effect
            assert (got[row] - expected[row]).norm() < 1e-4 * scale, f"{batch} rows of {names}, row {row}"

    check(2, 6, None)
    check(3, 7, None)
    assert counter.frame_count == 2
    enabled.load(family.folder / "a", "one")
    check(3, 7, ["one", None, "one"])
    enabled.load(family.folder / "b", "two")
    check(4, 5, ["two", "one", None, "two"])
    check(4, 5, "two")
    enabled.load(family.folder / "c", "one")  # in place of a
    enabled.load(family.folder / "a", "three")
    check(5, 9, ["one", "two", None, "three", "one"])
    enabled.unload("two")
    check(2, 6, ["three", None])
    check(2, 6, None)
    assert counter.frame_count == 2


def test_base_rows_of_compiled_code(family: Any) -> None:
    """Rows without an adapter have the bits of the compiled model before any adapter was loaded."""
    enabled = family.enable()
    run, _ = compiled(family.model, as_module, "inductor")
    ids = family.prompts(4)
    base = run(ids)
    enabled.load(family.folder / "c", "c")
    with enabled.adapters([None, "c", "c", None]):
        got = run(ids)
    assert torch.equal(got[[0, 3]], base[[0, 3]]) and not torch.allclose(got[1], base[1], rtol=0.1)


def test_wrong_length_in_front_of_a_compiled_module(family: Any) -> None:
    """torch.compile(model) checks the batch like the model itself."""
    enabled = family.enable("a")
    run, counter = compiled(family.model, as_module, "eager")
    with enabled.adapters(["a", None]):
        run(family.prompts(2))
        with pytest.raises(ValueError, match="each of the 4 sequences of the batch, got 2"):
            run(family.prompts(4))
    assert counter.frame_count == 1


def test_generate_with_compiled_steps(family: Any) -> None:
    """generate's own compilation of the decode step, with a static cache: the same tokens, in a second call too."""
    enabled = family.enable("a", "b")
    options = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    options._compile_all_devices = True
    settings = dict(max_new_tokens=5, do_sample=False, cache_implementation="static")
    ids = family.prompts(3)
    for names in (["a", None, "b"], ["b", "a", None]):
        with enabled.adapters(names):
            got = family.model.generate(ids, **settings, compile_config=options)
        for row, name in enumerate(names):
            alone = family.merged[name].generate(ids[row : row + 1], **settings, disable_compile=True)
            assert torch.equal(got[row], alone[0]), f"row {row}: {name}"


def test_replay(family: Any) -> None:
    """A recorded forward follows other choices, loads and swaps at the addresses that it was recorded with.

    On a CPU linear layers without users are left out while recording, so each has one here; captures on a GPU hold them all.
    """
    enabled = family.enable("a", "b", "c")
    ids = family.prompts(3)
    mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(3, 1, 7, 7)  # transformers reads smaller ones on the host

    def forward() -> Tensor:
        logits: Tensor = family.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits

    graph = FakeGraph()
    with enabled.adapters(["a", "b", "c"]), graph:
        got = forward()

    def check(names: list[str | None]) -> None:
        with enabled.adapters(names):
            expected = forward()
            graph.replay()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    check(["b", None, "a"])
    enabled.load(family.folder / "c", "b")
    check(["b", "b", None])
    enabled.unload("a")
    check(["c", None, "b"])
