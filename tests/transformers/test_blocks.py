"""Blocks of `adapters` in odd orders, and what would otherwise run without an adapter and not say so."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")

from moelora_ops import AdapterError  # noqa: E402
from moelora_ops.integrations import _linears  # noqa: E402
from moelora_ops.integrations.transformers import enable  # noqa: E402


def check(family: Any, logits: Tensor, name: str) -> None:
    """One row's logits are those of PEFT's merged model."""
    expected = family.merged[name](family.prompts(1)).logits
    assert (logits - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("names", "beams"), [(["a"], 1), (["a", "b"], 1), (["a", "b"], 2)])
def test_generate_takes_no_multiple_of_the_prompts(family: Any, names: list[str], beams: int) -> None:
    """Four prompts want four names inside generate too: a divisor of four is no number of beams."""
    enabled = family.enable("a", "b")
    with enabled.adapters(names), pytest.raises(ValueError, match=f"each of the 4 sequences of the batch, got {len(names)}"):
        family.model.generate(family.prompts(4), max_new_tokens=2, num_beams=beams)
    embeds = family.model.get_input_embeddings()(family.prompts(2))
    with enabled.adapters(["a", "b"]):
        got = family.model.generate(inputs_embeds=embeds, max_new_tokens=2, do_sample=False, num_beams=2)
        assert torch.equal(got, family.model.generate(family.prompts(2), max_new_tokens=2, do_sample=False, num_beams=2)[:, 7:])


def test_unload_inside_another_block(family: Any) -> None:
    """An adapter of an outer block is in use, though the inner one has others."""
    enabled = family.enable("a", "b")
    with enabled.adapters("a"):
        with enabled.adapters("b"), pytest.raises(ValueError, match="not in use, got 'a'"):
            enabled.unload("a")
        check(family, family.model(family.prompts(1)).logits, "a")
    enabled.unload("a")


def test_blocks_that_end_in_another_order(family: Any) -> None:
    """Whatever the order of their ends, the last open block counts, and after all of them the base model."""
    enabled, ids = family.enable("a", "b"), family.prompts(1)
    base = family.model(ids).logits
    first, second = enabled.adapters("a"), enabled.adapters("b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    check(family, family.model(ids).logits, "b")
    second.__exit__(None, None, None)
    assert torch.equal(family.model(ids).logits, base)


def test_two_threads(family: Any) -> None:
    """A thread that chooses while another's block is open is refused; one that only runs the model has the block's adapters."""
    enabled, got = family.enable("a", "b"), []

    def choose() -> None:
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="by two threads at a time"), enabled.adapters("b"):
                pass
            got.append(family.model(family.prompts(1)).logits)  # nothing where pytest.raises raised

    def in_thread() -> None:
        thread = threading.Thread(target=choose)
        thread.start()
        thread.join()

    with enabled.adapters("a"):
        in_thread()
        check(family, family.model(family.prompts(1)).logits, "a")
    assert len(got) == 1
    check(family, got[0], "a")


def test_another_implementation_of_the_experts(family: Any) -> None:
    """Experts that somebody switched to another implementation would leave adapters out: an error, but for base rows."""
    enabled, ids = family.enable("a"), family.prompts(1)
    family.model.set_experts_implementation("eager")
    family.model(ids)
    with enabled.adapters(None):
        family.model(ids)
    message = "implementation must be 'moelora' for adapters to have an effect, got .*eager"
    with pytest.raises(ValueError, match=message), enabled.adapters("a"):
        pass
    family.model.set_experts_implementation("moelora")
    with enabled.adapters("a"):
        family.model.set_experts_implementation("eager")
        with pytest.raises(ValueError, match=message):
            family.model(ids)


def test_closed(family: Any) -> None:
    """A closed one loads and chooses nothing, and closing it again leaves the next one alone."""
    first = family.enable("a")
    first.close()
    for use in (lambda: first.load(family.folder / "a", "a"), lambda: first.adapters(None).__enter__(), first.refresh):
        with pytest.raises(ValueError, match="must be enabled, got one that was closed"):
            use()
    second = family.enable("a")
    first.close()
    with second.adapters("a"):
        check(family, family.model(family.prompts(1)).logits, "a")


def test_copies_follow(family: Any) -> None:
    """A deep copy of what `enable` returned is the same one; copied models follow choices after the pools moved, or raise."""
    enabled, ids = family.enable("a"), family.prompts(1)
    twin = copy.deepcopy(family.model)
    with copy.deepcopy(enabled).adapters("a"):
        check(family, family.model(ids).logits, "a")
        check(family, twin(ids).logits, "a")
    family.model.to(torch.bfloat16)
    with enabled.adapters("a"):
        expected = family.model(ids).logits
        with pytest.raises(TypeError, match="must have dtype"):
            twin(ids)
        assert torch.equal(twin.to(torch.bfloat16)(ids).logits, expected)


def test_a_module_that_torch_compile_made(family: Any) -> None:
    """Enabled is the model inside: experts and linear layers, before and after compilation."""
    compiled = torch.compile(family.model, backend="eager")
    enabled = enable(compiled, max_loras=2, max_rank=8)
    assert len(enabled.load(family.folder / "a", "a").linears) == 8
    with enabled.adapters("a"):
        check(family, compiled(input_ids=family.prompts(1)).logits, "a")
    torch._dynamo.reset()


def test_a_move_that_runs_out_of_memory(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast whose pools do not fit raises and loses nothing: the next forward tries again."""
    enabled, ids, fixed, made = family.enable("a"), family.prompts(1), _linears.fixed, [0]
    with enabled.adapters("a"):
        exact = family.model(ids).logits
    hooks = sum(len(module._forward_hooks) for module in family.model.modules())
    family.model.to(torch.bfloat16)

    def short(*shape: int, **options: Any) -> Tensor:
        made[0] += 1
        if made[0] == 5:
            raise torch.OutOfMemoryError("no memory")
        return fixed(*shape, **options)

    monkeypatch.setattr(_linears, "fixed", short)
    with pytest.raises(torch.OutOfMemoryError):
        family.model(ids)
    monkeypatch.undo()
    base = family.model(ids).logits
    with enabled.adapters("a"):
        got = family.model(ids).logits
    assert (got - exact).norm() < 0.1 * (exact - base).norm()
    assert sum(len(module._forward_hooks) for module in family.model.modules()) == hooks


def test_a_cast_of_attention_alone(family: Any) -> None:
    """Slots of linear layers follow their own layer, whose dtype may be another than the experts'."""
    enabled = family.enable("a")
    slots = enabled._linear_pool._linears["model.layers.0.self_attn.q_proj"]
    before = slots.a.clone()
    family.model.model.layers[0].self_attn.to(torch.bfloat16)
    with enabled.adapters("a"):
        assert slots.a.dtype == torch.bfloat16 and torch.equal(slots.a, before.bfloat16()) and before.any()
    assert enabled.pool.dtype == torch.float32 and enabled.pool.rank(0) == 2


@pytest.mark.parametrize("where", ["experts", "linears"])
def test_an_interrupted_load_leaves_no_half_adapter(family: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """KeyboardInterrupt while a slot is written: the name is gone, and nothing of either adapter is left in the slot."""
    enabled, ids = family.enable("a", "b"), family.prompts(1)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    target = (enabled.pool, "_write") if where == "experts" else (enabled._linear_pool, "load")
    monkeypatch.setattr(*target, interrupted)
    with pytest.raises(KeyboardInterrupt):
        enabled.load(family.folder / "b", "a")
    assert list(enabled.reports) == ["b"] and enabled.pool.rank(0) == 0 and not enabled.pool.is_enabled(0)
    assert not any(0 in linear.users or linear.b[0].any() for linear in enabled._linear_pool._linears.values())
    assert enabled.load(family.folder / "a", "a").slot == 0
    with enabled.adapters("a"):
        check(family, family.model(ids).logits, "a")


def changed(source: Path, target: Path, kind: str) -> Path:
    """An adapter that changes nothing: B as training starts with, or alpha 0; or all of it but one B."""
    shutil.copytree(source, target)
    if kind == "alpha":
        config = json.loads((source / "adapter_config.json").read_text())
        (target / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 0}))
        return target
    tensors = load_file(source / "adapter_model.safetensors")
    kept = next(name for name in tensors if "lora_B" in name and "o_proj" in name) if kind == "but one" else ""
    zeroed = {name: t * 0 if "lora_B" in name and name != kept else t for name, t in tensors.items()}
    save_file(zeroed, target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize("kind", ["B", "alpha", "but one"])
@pytest.mark.filterwarnings("error")
def test_an_adapter_that_changes_nothing(family: Any, tmp_path: Path, kind: str) -> None:
    """All deltas zero: a warning and a field of the report, and an error with strict=True; one that is not makes it usual."""
    enabled, source = family.enable(max_loras=1, max_rank=8), changed(family.folder / "a", tmp_path / "zero", kind)
    if kind == "but one":
        assert not enabled.load(source, "zero", strict=True).is_zero
        return
    with pytest.raises(AdapterError, match="adapters that have an effect only, got every B, A or scaling in it is zero"):
        enabled.load(source, "zero", strict=True)
    assert not enabled.reports
    with pytest.warns(UserWarning, match="adapter 'zero' changes nothing: every B, A or scaling"):
        assert enabled.load(source, "zero").is_zero


@pytest.mark.parametrize(("names", "kind"), [(5, TypeError), ([5], ValueError), ([["a"]], ValueError)])
def test_names_of_other_types(family: Any, names: Any, kind: type[Exception]) -> None:
    """Not names: an error that says so, and nothing is chosen."""
    enabled = family.enable("a")
    with pytest.raises(kind, match="names must be"), enabled.adapters(names):
        pass
    assert enabled._sequences.host == (-1,)
    with pytest.raises(ValueError, match="name must be of a loaded adapter, got None"):
        enabled.unload(None)


def test_attention_alone_survives_a_failed_load(family: Any, tmp_path: Path) -> None:
    """Rank 0 of the experts is not an empty slot: what was there stays when its replacement is refused."""
    source = tmp_path / "attention"
    shutil.copytree(family.folder / "b", source)
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if "experts" not in n}, source / "adapter_model.safetensors")
    broken = tmp_path / "broken"
    shutil.copytree(family.folder / "a", broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    save_file({n: t + 3e38 if "experts.lora_B" in n else t for n, t in tensors.items()}, broken / "adapter_model.safetensors")
    enabled, ids = family.enable(max_loras=1, max_rank=8), family.prompts(1)
    enabled.load(source, "attention")
    with enabled.adapters("attention"):
        before = family.model(ids).logits
        with pytest.raises(AdapterError, match="must be finite"):
            enabled.load(broken, "attention")
        assert torch.equal(family.model(ids).logits, before) and enabled.reports["attention"].rank == 0
