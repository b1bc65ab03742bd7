"""Whatever a reader does not understand is refused by name."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelora_ops import AdapterError, load_adapter
from moelora_ops.testing.adapter_files import BASE, CONFIG, PREFIX, Files, fused, load_files, per_expert, write


def set_config(**fields: Any) -> Callable[[Files], Files]:
    return lambda files: (files[0] | fields, files[1])


def without(field: str) -> Callable[[Files], Files]:
    return lambda files: ({k: v for k, v in files[0].items() if k != field}, files[1])


def change(pattern: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Files], Files]:
    def apply(files: Files) -> Files:
        hits = [n for n in files[1] if re.search(pattern, n)]
        assert hits
        return files[0], files[1] | {n: edit(files[1][n]).contiguous() for n in hits}

    return apply


def drop(pattern: str) -> Callable[[Files], Files]:
    return lambda files: (files[0], {n: t for n, t in files[1].items() if not re.search(pattern, n)})


def add(name: str, *shape: int) -> Callable[[Files], Files]:
    return lambda files: (files[0], files[1] | {name: torch.ones(shape)})


def poison(value: float) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[-1, -1] = value
        return tensor

    return edit


ONE = r"layers\.2\.mlp\.experts\.1\.up_proj\.lora_A"
ONE_NAME = f"{PREFIX}2.mlp.experts.1.up_proj.lora_A.weight"
OUTER = f"{PREFIX}1.mlp.experts"
BOTH_KINDS: dict[str, tuple[Callable[[Files], Files], str]] = {
    "no r": (without("r"), "adapter_config field r must be an int >= 1, got None"),
    "r = 0": (set_config(r=0), "field r must be an int >= 1, got 0"),
    "r is true": (set_config(r=True), "field r must be an int"),
    "r is text": (set_config(r="4"), "field r must be an int"),
    "no alpha": (without("lora_alpha"), "field lora_alpha must be a finite number, got None"),
    "alpha NaN": (set_config(lora_alpha=math.nan), "field lora_alpha must be a finite number"),
    "alpha past fp32": (set_config(lora_alpha=10**400), "field lora_alpha must be a finite number"),
    "other r": (set_config(r=2), "r of the config = 2|of rank 2"),
    "huge r": (set_config(r=10**12), "1000000000000"),
    "other r by pattern": (set_config(rank_pattern={r"layers\.2\..*": 3}), "r of the config = 3|of rank 3"),
    "pattern no regex": (set_config(rank_pattern={"(": 3}), "field rank_pattern must have regular expressions"),
    "pattern no regex where it stands": (set_config(rank_pattern={"(?i)down": 3}), "must have regular expressions .* '[(]"),
    "pattern value": (set_config(alpha_pattern={"x": None}), "field alpha_pattern.'x'. must be a finite number"),
    "pattern is a list": (set_config(rank_pattern=[1]), "field rank_pattern must be an object"),
    "other method": (set_config(peft_type="LOKR"), "field peft_type must be LORA, got 'LOKR'"),
    "dora": (set_config(use_dora=True), "field use_dora"),
    "dora tensor": (add(f"{PREFIX}1.self_attn.q_proj.lora_magnitude_vector", 3), "lora_magnitude_vector must not be there"),
    "bias all": (set_config(bias="all"), "field bias"),
    "bias on B": (set_config(lora_bias=True), "field lora_bias"),
    "fan in fan out": (set_config(fan_in_fan_out=True), "field fan_in_fan_out"),
    "replication": (set_config(layer_replication=[[0, 2]]), "field layer_replication"),
    "activated": (set_config(alora_invocation_tokens=[1]), "field alora_invocation_tokens"),
    "pissa": (set_config(init_lora_weights="pissa_niter_4"), "field init_lora_weights"),
    "olora": (set_config(init_lora_weights="olora"), "field init_lora_weights"),
    "unknown variant": (set_config(use_new_thing=True), "field use_new_thing"),
    "unknown variant's config": (set_config(kasa_config={"beta": 1}), "field kasa_config"),
    "target_parameters": (set_config(target_parameters="all"), "field target_parameters must be a list"),
    "saved experts": (add(f"{OUTER}.gate_up_proj", 4, 20, 12), "experts.gate_up_proj must be a LoRA tensor of routed experts"),
    "other tool's tensor": (add(f"{PREFIX}1.mlp.switch_mlp.up_proj.lora_a", 4, 4, 12), "one format, got .*switch_mlp"),
    "experts in capitals": (add("model.layers.1.MoE.Experts.0.up_proj.lora_A.weight", 4, 12), "Experts.* known format"),
    "endless layer id": (add(f"{PREFIX}{'1' * 5000}.mlp.experts.0.up_proj.lora_A.weight", 4, 12), "1111.* known format"),
    "layer out of range": (
        add(f"{PREFIX}3.mlp.experts.0.up_proj.lora_A.weight", 4, 12),
        "one format|layer must be one of the base",
    ),
    "another stack's layer": (add("base_model.model.mtp.layers.1.mlp.experts.lora_A.weight", 4, 12), "mtp.* known format"),
    "config is a list": (lambda files: ([1], files[1]), "must be a JSON object, got list"),
    "config is no JSON": (lambda files: ("{'r': 4}", files[1]), "must be JSON"),
}
PER_EXPERT = BOTH_KINDS | {
    "half missing": (drop(ONE), r"experts\.1\.up_proj must have lora_A and lora_B, got only .*lora_B"),
    "NaN": (change(ONE, poison(math.nan)), f"{ONE_NAME} must be finite"),
    "inf": (change(ONE, poison(math.inf)), f"{ONE_NAME} must be finite"),
    "ints": (change(ONE, lambda t: t.to(torch.int8)), f"{ONE_NAME} must have dtype float32"),
    "fp8": (change(ONE, lambda t: t.to(torch.float8_e4m3fn)), f"{ONE_NAME} must have dtype float32"),
    "transposed": (change(ONE, lambda t: t.T), f"{ONE_NAME} must have shape .r of the config = 4, in = 12., got .12, 4."),
    "3-D": (change(ONE, lambda t: t[None]), f"{ONE_NAME} must have shape"),
    "ranks of the pair differ": (change(ONE, lambda t: t[:2]), f"{ONE_NAME} must have shape"),
    "other hidden size": (change(ONE, lambda t: t[:, :11]), f"{ONE_NAME} must have shape"),
    "expert out of range": (add(f"{OUTER}.4.up_proj.lora_A.weight", 4, 12), "expert must be < num_experts = 4, got 4"),
    "endless expert id": (add(f"{OUTER}.{'1' * 5000}.up_proj.lora_A.weight", 4, 12), "1111.* known format"),
    "another script's digit": (add(f"{OUTER}.\u0663.down_proj.lora_A.weight", 4, 10), "known format"),
    "dense layer": (add(f"{PREFIX}0.mlp.experts.0.up_proj.lora_A.weight", 4, 12), r"layer must be .* \(1, 2\), got 0"),
    "same tensor by another name": (add(f"{OUTER}.0.w3.lora_A.weight", 4, 12), "one lora_A per expert and projection"),
    "bias tensor": (add(f"{OUTER}.0.up_proj.lora_B.bias", 10), "lora_B.bias must be a LoRA tensor"),
    "unknown projection": (add(f"{OUTER}.0.mix_proj.lora_A.weight", 4, 12), "mix_proj.lora_A.weight must be a LoRA tensor"),
    "a second adapter": (add(f"{OUTER}.0.up_proj.lora_A.second.weight", 4, 12), "must be of one adapter, got .*second.weight"),
    "two formats": (add(f"{OUTER}.lora_A.weight", 16, 10), "expert tensors must have one format"),
}
FUSED = BOTH_KINDS | {
    "half missing": (drop(r"1\.mlp\.experts\.lora_A"), "layers.1.mlp.experts must have lora_A and lora_B for each parameter"),
    "parameter not named": (set_config(target_parameters=["experts.down_proj"]), "for each parameter .* down_proj, got"),
    "no parameter named": (set_config(target_parameters=["experts.w1"]), "for each parameter .* none, got"),
    "bias named": (set_config(target_parameters=["gate_up_proj", "down_proj", "experts.down_proj_bias"]), "must name weights"),
    "three wrappers": (add(f"{OUTER}.base_layer.base_layer.lora_A.weight", 16, 12), "for each parameter"),
    "NaN": (change(r"1\.mlp\.experts\.lora_B", poison(math.nan)), f"{OUTER}.lora_B.weight must be finite"),
    "other number of experts": (
        change(r"1\.mlp\.experts\.lora_[AB]", lambda t: t[:12] if len(t) == 16 else t[:, :12]),
        "must have shapes .* for down_proj with 4 experts of rank 4",
    ),
    "both orientations": (
        lambda files: (files[0], files[1] | {
            f"{OUTER}.lora_A.weight": torch.ones(16, 12), f"{OUTER}.lora_B.weight": torch.ones(10, 16)
        }),
        "one orientation, got both",
    ),
    "a layer under two prefixes": (
        lambda files: (files[0], files[1] | {n.removeprefix("base_model.model.model."): t + 1 for n, t in files[1].items()}),
        "each layer must have one set of experts, got layers.1.mlp.experts, layers.2.mlp.experts, model.layers.1",
    ),
    "same tensor without prefix": (add(f"{OUTER}.lora_A.weight".removeprefix("base_model.model."), 16, 10), "one such tensor"),
}  # fmt: skip


@pytest.mark.parametrize("why", PER_EXPERT)
def test_refuses_a_per_expert_file(tmp_path: Path, why: str) -> None:
    """One thing wrong, and the message names it."""
    edit, message = PER_EXPERT[why]
    with pytest.raises(AdapterError, match=message):
        load_files(tmp_path, edit(per_expert()))


@pytest.mark.parametrize("why", FUSED)
def test_refuses_a_fused_file(tmp_path: Path, why: str) -> None:
    """One thing wrong, and the message names it."""
    edit, message = FUSED[why]
    with pytest.raises(AdapterError, match=message):
        load_files(tmp_path, edit(fused()))


def test_harmless_settings_load(tmp_path: Path) -> None:
    """What PEFT writes without changing the meaning of the pair."""
    harmless = {
        "init_lora_weights": "gaussian",
        "bias": "none",
        "loftq_config": {},
        "eva_config": {"rho": 2.0},
        "use_dora": False,
    }
    harmless |= {
        "lora_dropout": 0.1,
        "layers_to_transform": [1],
        "modules_to_save": ["lm_head"],
        "megatron_core": "megatron.core",
    }
    config, tensors = per_expert()
    want = load_files(tmp_path, (config, tensors)).delta_weight(1, "down")
    assert torch.equal(load_files(tmp_path, (config | harmless, tensors)).delta_weight(1, "down"), want)


@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_refuses_a_truncated_file(tmp_path: Path, size: int) -> None:
    """Empty, cut in the length, in the header, in the data."""
    file = write(tmp_path, *per_expert()) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(AdapterError, match="adapter_model.safetensors must be a whole safetensors file"):
        load_adapter(tmp_path, BASE)


def test_never_opens_a_pickle(tmp_path: Path) -> None:
    """adapter_model.bin, alone or as the path itself."""

    class Trap:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('a pickle was opened')",)

    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(AdapterError, match="adapter_model.bin is a pickle"):
        load_adapter(tmp_path, BASE)
    with pytest.raises(AdapterError, match="must be a folder or a .safetensors file"):
        load_adapter(tmp_path / "adapter_model.bin", BASE)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Neither path, nor folder, nor weights, nor config."""
    with pytest.raises(AdapterError, match="path must be a folder or a file, got NoneType"):
        load_adapter(None, BASE)  # type: ignore[arg-type]
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(AdapterError, match="path must"):
            load_adapter(path, BASE)
    write(tmp_path, *per_expert())
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="adapter_config.json"):
        load_adapter(tmp_path, BASE)


def test_the_adapter_does_not_depend_on_its_file(tmp_path: Path) -> None:
    """Overwriting the file in place later changes nothing."""
    for files in (per_expert(), fused()):
        adapter = load_files(tmp_path, files)
        before = [adapter.delta_weight(layer, p) for layer in (1, 2) for p in ("gate_up", "down")]
        weights = tmp_path / "adapter_model.safetensors"
        with weights.open("r+b") as file:
            file.write(b"\xff" * weights.stat().st_size)
        after = [adapter.delta_weight(layer, p) for layer in (1, 2) for p in ("gate_up", "down")]
        assert all(map(torch.equal, after, before))
