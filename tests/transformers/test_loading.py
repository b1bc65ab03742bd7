"""Loading, replacing and unloading adapters of a transformers model: slots, faults, what has no effect."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
peft = pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")

from moelora_ops import AdapterError  # noqa: E402


def test_slots(family: Any, tmp_path: Path) -> None:
    """Loading takes free slots, reloading a name replaces in place, unloading frees; what is in use stays."""
    enabled, ids = family.enable("a", "b", "c"), family.prompts(1)
    assert [report.slot for report in enabled.reports.values()] == [0, 1, 2]
    enabled.load(family.folder / "a", "d")
    with pytest.raises(AdapterError, match=r"e: a slot must be free, got all 4 \(max_loras\) taken by a, b, c, d"):
        enabled.load(family.folder / "b", "e")

    def with_adapter(name: str) -> Tensor:
        with enabled.adapters(name):
            return family.model(ids).logits

    a, b = with_adapter("a"), with_adapter("b")
    enabled.load(family.folder / "b", "a")
    assert torch.equal(with_adapter("a"), b) and torch.equal(with_adapter("d"), a)
    with enabled.adapters("b"), pytest.raises(ValueError, match="not in use, got 'b'"):
        enabled.unload("b")
    enabled.unload("b")
    assert enabled.pool.rank(1) == 0 and not enabled._linear_pool.adapter_enabled[1]
    assert enabled.load(family.folder / "a", "f").slot == 1
    assert torch.equal(with_adapter("f"), a), "nothing of the former adapter is left in the slot"
    with pytest.raises(ValueError, match="loaded adapters .*, got 'b'"):
        enabled.unload("b")


def edited(source: Path, target: Path, edit: Any) -> Path:
    """A copy of an adapter with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(source / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def q_name(tensors: dict[str, Tensor], half: str) -> str:
    return next(name for name in tensors if f"layers.0.self_attn.q_proj.lora_{half}" in name)


def overflow(tensors: dict[str, Tensor]) -> None:
    """Finite in the file, and infinite when the scaling is multiplied in: found by the pool itself, after all reading."""
    next(tensor for name, tensor in tensors.items() if "experts.lora_B" in name).fill_(3e38)
    tensors[q_name(tensors, "B")].mul_(2)


BROKEN = {
    "overflow": (overflow, "must be finite"),
    "half": (lambda t: t.pop(q_name(t, "A")), "must have lora_A and lora_B, got only .*lora_B"),
    "shape": (lambda t: t.update({q_name(t, "B"): torch.zeros(31, 2)}), r"must have shape \(32, 2\).*got \(31, 2\)"),
    "nan": (lambda t: t[q_name(t, "B")].fill_(float("nan")), "must be finite"),
    "expert": (lambda t: t.pop(next(n for n in t if "experts" in n)), "must have lora_A and lora_B"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_failed_load_changes_nothing(family: Any, tmp_path: Path, kind: str) -> None:
    """A fault in any tensor is found before anything is written: experts and linear layers keep what the slot held."""
    edit, message = BROKEN[kind]
    enabled, ids = family.enable("a"), family.prompts(1)
    with enabled.adapters("a"):
        before = family.model(ids).logits
    with pytest.raises(AdapterError, match=message):
        enabled.load(edited(family.folder / "a", tmp_path / "broken", edit), "a")
    with enabled.adapters("a"):
        assert torch.equal(family.model(ids).logits, before)


def test_rank_of_a_linear_layer(family: Any, tmp_path: Path) -> None:
    """A linear layer's rank has the limit of the experts'."""
    source = edited(family.folder / "a", tmp_path / "wide", lambda t: [t.pop(n) for n in list(t) if "experts" in n])
    config = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps({**config, "r": 20}))
    tensors = load_file(source / "adapter_model.safetensors")
    wide = {n: t.new_ones((20, t.shape[1]) if "lora_A" in n else (t.shape[0], 20)) for n, t in tensors.items()}
    save_file(wide, source / "adapter_model.safetensors")
    enabled = family.enable(max_loras=1, max_rank=16)
    with pytest.raises(AdapterError, match="rank must be <= max_rank = 16, got 20"):
        enabled.load(source, "wide")


def test_what_is_not_applied_is_reported(family: Any, tmp_path: Path) -> None:
    """Tensors without effect on this model are in the report and in a warning, and an error with strict=True."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(2, 64)
        tensors["base_model.model.visual.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(2, 32)
        tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"] = torch.ones(2, 32)

    source = edited(family.folder / "a", tmp_path / "more", edit)
    enabled = family.enable(max_loras=1, max_rank=16)
    with pytest.raises(AdapterError, match="strict=True takes tensors that have an effect only, got .*embed_tokens"):
        enabled.load(source, "a", strict=True)
    with pytest.warns(UserWarning, match="adapter 'a': not applied to this model: .*embed_tokens"):
        report = enabled.load(source, "a")
    assert len(report.not_applied) == 3 and len(report.linears) == 8
    with enabled.adapters("a"):
        expected = family.merged["a"](family.prompts(1)).logits
        assert (family.model(family.prompts(1)).logits - expected).norm() < 1e-4 * expected.norm()


def respelled(source: Path, target: Path, name: Callable[[str], str], mlx: bool = False) -> Path:
    """The linear layers' part of an adapter under other names: same values."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for old in list(tensors):
            tensor = tensors.pop(old)
            if "experts" not in old:
                tensors[name(old)] = tensor.t().contiguous() if mlx else tensor

    return edited(source, target, edit)


PEFT = "base_model.model."
SPELLINGS: dict[str, Callable[[str], str]] = {
    "with the adapter's name": lambda n: n.replace(".weight", ".default.weight"),
    "without base_model": lambda n: n.removeprefix(PEFT),
    "layers alone": lambda n: n.removeprefix(f"{PEFT}model."),
    "of a multimodal model": lambda n: n.replace(f"{PEFT}model.", f"{PEFT}model.language_model."),
    "of another one": lambda n: n.replace(f"{PEFT}model.", f"{PEFT}thinker.model."),
    "compiled": lambda n: n.replace(f"{PEFT}model.", f"{PEFT}_orig_mod.model.").replace("self_attn", "self_attn._orig_mod"),
    "FSDP": lambda n: n.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
    "mlx": lambda n: n.removeprefix(PEFT).replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_of_linear_layers(family: Any, tmp_path: Path, spelling: str) -> None:
    """Linear layers under the names of other tools are applied like those under PEFT's, or refused: never lost."""
    enabled, ids = family.enable(max_loras=2, max_rank=16), family.prompts(1)
    plain = respelled(family.folder / "b", tmp_path / "plain", str)
    other = respelled(family.folder / "b", tmp_path / "other", SPELLINGS[spelling], mlx=spelling == "mlx")
    if spelling == "mlx":
        (other / "adapter_model.safetensors").rename(other / "adapters.safetensors")
        with pytest.raises(AdapterError, match="must have mlx-lm's lora_parameters.scale for model.layers.0.self_attn"):
            enabled.load(other, "other")
        fields = json.loads((other / "adapter_config.json").read_text())
        parameters = {"rank": fields["r"], "scale": fields["lora_alpha"] / fields["r"], "dropout": 0.0}
        (other / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reports = [enabled.load(plain, "plain"), enabled.load(other, "other")]
    assert reports[0].linears == reports[1].linears and len(reports[1].linears) == 8
    results = []
    for name in ("plain", "other", None):
        with enabled.adapters(name):
            results.append(family.model(ids).logits)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_both_spellings_of_one_layer_are_refused(family: Any, tmp_path: Path) -> None:
    """Two tensors for the same place are not understood."""

    def edit(tensors: dict[str, Tensor]) -> None:
        name = q_name(tensors, "A")
        tensors[name.removeprefix(PEFT)] = tensors[name].clone()

    with pytest.raises(AdapterError, match="must have one lora_A and one lora_B, got also"):
        family.enable(max_loras=1, max_rank=16).load(edited(family.folder / "b", tmp_path / "both", edit), "both")


def test_linears_can_be_left_to_the_base(family: Any) -> None:
    """With `linears` named, the others are reported; an adapter for linear layers alone loads too."""
    enabled = family.enable(max_loras=2, max_rank=16, linears=("q_proj", "v_proj"))
    with pytest.warns(UserWarning, match="o_proj"):
        report = enabled.load(family.folder / "a", "a")
    assert {name.rpartition(".")[2] for name in report.linears} == {"q_proj", "v_proj"}
    assert {name.split(".")[-3] for name in report.not_applied} == {"k_proj", "o_proj"}
    with pytest.raises(TypeError, match="linears must be a sequence of names, got the string 'q_proj'"):
        family.enable(max_loras=2, max_rank=16, linears="q_proj")


def test_attention_alone(family: Any, tmp_path: Path) -> None:
    """An adapter without expert tensors is one like any other."""
    source = edited(family.folder / "b", tmp_path / "attention", lambda t: [t.pop(n) for n in list(t) if "experts" in n])
    enabled, ids = family.enable(max_loras=1, max_rank=16), family.prompts(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = enabled.load(source, "attention")
    assert report.rank == 0 and report.expert_layers == () and len(report.linears) == 8
    base = family.model(ids).logits
    with enabled.adapters(["attention", None]):
        got = family.model(ids).logits
    assert torch.equal(got[1], base[1])
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(family.merged[None]), source).merge_and_unload()
    expected = merged(ids[:1]).logits[0]
    assert (got[0] - expected).norm() < 1e-4 * (expected - base[0]).norm()
