"""Small adapter files made here, edited one thing at a time."""

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
from safetensors.torch import save_file
from torch import Tensor

from moelora_ops import AdapterError, LoraPool, load_adapter
from moelora_ops.adapters.config import AdapterConfig

BASE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "hidden_size": 12,
    "moe_intermediate_size": 10,
    "intermediate_size": 50,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
PREFIX = "base_model.model.model.layers."
Files = tuple[dict[str, Any], dict[str, Tensor]]


def per_expert() -> Files:
    """Layers 1 and 2, all experts and projections, rank 4, alpha 8."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (1, 2):
        for expert in range(4):
            for projection, (size_in, size_out) in {"gate": (12, 10), "up": (12, 10), "down": (10, 12)}.items():
                stem = f"{PREFIX}{layer}.mlp.experts.{expert}.{projection}_proj"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(4, size_in, generator=generator)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(size_out, 4, generator=generator)
    return dict(CONFIG), tensors


def fused() -> Files:
    """Layers 1 and 2, both parameters, rank 4, alpha 8, natural orientation."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (1, 2):
        for wrapper, size_in, size_out in ((".base_layer", 12, 20), ("", 10, 12)):
            stem = f"{PREFIX}{layer}.mlp.experts{wrapper}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(16, size_in, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size_out, 16, generator=generator)
    return CONFIG | {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, tensors


def write(folder: Path, config: Any, tensors: dict[str, Tensor]) -> Path:
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load_files(folder: Path, files: Files, base: dict[str, Any] = BASE, **options: Any) -> Any:
    return load_adapter(write(folder, *files), base, **options)


def expert_delta(tensors: dict[str, Tensor], layer: int, expert: int, projection: str, scaling: float) -> Tensor:
    stem = f"{PREFIX}{layer}.mlp.experts.{expert}.{projection}_proj"
    return scaling * (tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double())


def test_per_expert_values(tmp_path: Path) -> None:
    """dW = alpha / r * B A for each expert; a single file works like its folder."""
    config, tensors = per_expert()
    for adapter in (load_files(tmp_path, (config, tensors)), load_adapter(tmp_path / "adapter_model.safetensors", BASE)):
        assert adapter.rank == 4 and sorted(adapter.layers) == [1, 2] and adapter.unused == []
        for projection in ("gate", "up", "down"):
            delta = adapter.delta_weight(2, projection)
            for expert in range(4):
                want = expert_delta(tensors, 2, expert, projection, 2.0)
                torch.testing.assert_close(delta[expert].double(), want, rtol=1e-6, atol=1e-6)


def test_fused_values(tmp_path: Path) -> None:
    """Row e * r + j of lora_A goes with column j * E + e of lora_B; with expert_major with column e * r + j."""
    config, tensors = fused()
    a, b = (tensors[f"{PREFIX}1.mlp.experts.base_layer.lora_{half}.weight"].double() for half in "AB")
    for packing, column in ((None, lambda e, j: j * 4 + e), ("expert_major", lambda e, j: e * 4 + j)):
        delta = load_files(tmp_path, (config, tensors), b_packing=packing).delta_weight(1, "gate_up").double()
        for e in range(4):
            want = sum(2.0 * torch.outer(b[:, column(e, j)], a[e * 4 + j]) for j in range(4))
            torch.testing.assert_close(delta[e], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "version", "natural"),
    [
        ("mixtral", "0.18.1", False),
        ("mixtral", "0.19.0", False),
        ("mixtral", "0.19.1", True),
        ("mixtral", "0.21.0.dev0@unknown", True),
        ("gpt_oss", "0.18.1", True),
        ("gpt_oss", "0.19.0", False),
        ("gpt_oss", "0.19.1", True),
        ("llama4_text", "0.18.1", True),
        ("llama4_text", "0.19.0", True),
        ("llama4_text", "0.19.1", False),
    ],
)
def test_the_version_decides_where_no_shape_does(tmp_path: Path, model_type: str, version: str, natural: bool) -> None:
    """down with in == out, alone in the file: what each PEFT did for each storage."""
    base = BASE | {"model_type": model_type, "moe_intermediate_size": 12, "moe_layers": [1, 2]}
    config = CONFIG | {"target_parameters": ["experts.down_proj"], "peft_version": version}
    a, b = torch.randn(16, 12), torch.randn(12, 16)
    tensors = {f"{PREFIX}1.mlp.experts.lora_A.weight": a, f"{PREFIX}1.mlp.experts.lora_B.weight": b}
    delta = load_files(tmp_path, (config, tensors), base).delta_weight(1, "down")
    product = 2 * torch.einsum("oje,eji->eoi", b.view(12, 4, 4), a.view(4, 4, 12))
    torch.testing.assert_close(delta, product if natural else product.mT, rtol=1e-5, atol=1e-5)


def test_rslora_divides_by_the_square_root(tmp_path: Path) -> None:
    """vllm 55545, sglang 40835: use_rslora at r = 16 is alpha / 4, not alpha / 16, in the file's delta and in the pool."""
    config, tensors = per_expert()
    wide = {n: torch.cat([t] * 4, dim=0 if "lora_A" in n else 1) for n, t in tensors.items()}
    adapter = load_files(tmp_path, (config | {"r": 16, "use_rslora": True}, wide))
    want = expert_delta(wide, 1, 3, "down", 8 / 4)
    torch.testing.assert_close(adapter.delta_weight(1, "down")[3].double(), want, rtol=1e-5, atol=1e-5)
    pool = LoraPool.from_config(BASE, max_loras=1, max_rank=16, dtype=torch.float32)
    pool.load(adapter, 0)
    layer = pool.layer(1)
    torch.testing.assert_close((layer.lora_b2[0, 3] @ layer.lora_a2[0, 3]).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "path", "found"),
    [
        ("w2", "model.layers.0.mlp.experts.1.w2", True),
        ("w2", "model.layers.0.mlp.experts.1.xw2", False),
        (r"experts\.1\.w2", "model.layers.0.mlp.experts.1.w2", True),
        (r"experts\.1\.w2", "model.layers.0.mlp.experts.11.w2", False),
        (r".*\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", True),
        (r"^model\.layers\.0\.mlp\.experts\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", True),
        (r"^layers\.0\.mlp\.experts\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", False),
        ("experts", "model.layers.0.mlp.experts.gate_up_proj", False),
        ("w1|w2", "model.layers.0.mlp.experts.1.w2", True),
    ],
)
def test_patterns_match_like_peft_does(key: str, path: str, found: bool) -> None:
    """A pattern is a regular expression for the end of the path, starting at a dot."""
    config = AdapterConfig.from_fields(CONFIG | {"rank_pattern": {key: 2}, "alpha_pattern": {key: 6}})
    assert (config.rank(path), config.scaling(path)) == ((2, 3.0) if found else (4, 2.0))


def test_the_first_pattern_wins() -> None:
    """In the order of the file."""
    config = AdapterConfig.from_fields(CONFIG | {"alpha_pattern": {"w2": 4, r"1\.w2": 12}})
    assert config.alpha("model.layers.0.mlp.experts.1.w2") == 4


def test_ranks_and_scalings_per_expert(tmp_path: Path) -> None:
    """rank_pattern gives expert 2 rank 1 and alpha_pattern another alpha: its own scaling, zeros past its rank."""
    config, tensors = per_expert()
    for name in [n for n in tensors if ".1.mlp.experts.2.down_proj" in n]:
        tensors[name] = tensors[name][:1] if "lora_A" in name else tensors[name][:, :1].contiguous()
    key = r"layers\.1\.mlp\.experts\.2\.down_proj"
    adapter = load_files(tmp_path, (config | {"rank_pattern": {key: 1}, "alpha_pattern": {key: 3}}, tensors))
    down = adapter.layers[1]["down"]
    assert down.scaling.tolist() == [2.0, 2.0, 3.0, 2.0] and not down.a[2, 1:].any() and not down.b[2, :, 1:].any()
    want = expert_delta(tensors, 1, 2, "down", 3.0)
    torch.testing.assert_close(adapter.delta_weight(1, "down")[2].double(), want, rtol=1e-6, atol=1e-6)


def test_a_block_diagonal_rank_2r_becomes_two_slices_of_rank_r(tmp_path: Path) -> None:
    """Exactly block diagonal: half the work, the same change; one stray value keeps rank 2r, the same change too."""
    config, tensors = fused()
    for layer in (1, 2):
        b = tensors[f"{PREFIX}{layer}.mlp.experts.base_layer.lora_B.weight"].view(20, 4, 4)  # out, j, e
        b[:10, 2:], b[10:, :2] = 0, 0
    sliced = load_files(tmp_path, (config, tensors))
    assert {name: p.rank for name, p in sliced.layers[1].items()} == {"gate": 2, "up": 2, "down": 4}
    tensors[f"{PREFIX}1.mlp.experts.base_layer.lora_B.weight"][0, 15] = 1e-20
    dense = load_files(tmp_path, (config, tensors))
    assert {name: p.rank for name, p in dense.layers[1].items()} == {"gate": 4, "up": 4, "down": 4}
    torch.testing.assert_close(sliced.delta_weight(1, "gate_up"), dense.delta_weight(1, "gate_up"), rtol=1e-6, atol=1e-6)


def test_tensors_for_other_modules_are_listed_or_with_strict_refused(tmp_path: Path) -> None:
    """Router, shared experts, dense MLP, attention, head."""
    config, tensors = per_expert()
    others = [
        f"{PREFIX}1.{m}" for m in ("mlp.gate", "mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj", "self_attn.q_proj")
    ]
    others += [f"{PREFIX}0.mlp.gate_proj", "base_model.model.lm_head"]
    names = sorted(f"{o}.lora_{half}.weight" for o in others for half in "AB")
    files = config, tensors | {n: torch.zeros(1, 1) for n in names}
    assert load_files(tmp_path, files).unused == names
    with pytest.raises(AdapterError, match="^strict=True takes tensors of routed experts only, got base_model"):
        load_files(tmp_path, files, strict=True)


def test_max_rank(tmp_path: Path) -> None:
    """The limit itself is allowed."""
    assert load_files(tmp_path, per_expert(), max_rank=4).rank == 4
    with pytest.raises(AdapterError, match="rank must be <= max_rank = 3, got 4"):
        load_files(tmp_path, per_expert(), max_rank=3)


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
    "other tool's name": (add(f"{PREFIX}1.mlp.switch_mlp.up_proj.lora_a", 4, 4, 12), "switch_mlp.* in a known format"),
    "layer out of range": (
        add(f"{PREFIX}3.mlp.experts.0.up_proj.lora_A.weight", 4, 12),
        "one format|layer must be one with routed",
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
    "dense layer": (add(f"{PREFIX}0.mlp.experts.0.up_proj.lora_A.weight", 4, 12), r"layer must be .* \(1, 2\), got 0"),
    "same tensor by another name": (add(f"{OUTER}.0.w3.lora_A.weight", 4, 12), "one lora_A per expert and projection"),
    "bias tensor": (add(f"{OUTER}.0.up_proj.lora_B.bias", 10), "lora_B.bias must be a LoRA tensor"),
    "unknown projection": (add(f"{OUTER}.0.mix_proj.lora_A.weight", 4, 12), "mix_proj.lora_A.weight must be a LoRA tensor"),
    "adapter name in the key": (add(f"{OUTER}.0.up_proj.lora_A.default.weight", 4, 12), "default.weight must be a LoRA tensor"),
    "two formats": (add(f"{OUTER}.lora_A.weight", 16, 10), "expert tensors must have one format"),
}
FUSED = BOTH_KINDS | {
    "half missing": (drop(r"1\.mlp\.experts\.lora_A"), "layers.1.mlp.experts must have lora_A and lora_B for each parameter"),
    "parameter not named": (set_config(target_parameters=["experts.down_proj"]), "for each parameter .* down_proj, got"),
    "no parameter named": (without("target_parameters"), "for each parameter .* none, got"),
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
    """Neither folder, nor weights, nor config."""
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
