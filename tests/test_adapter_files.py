"""Values of small adapter files made here, edited one thing at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moelora_ops import AdapterError, LoraPool, load_adapter
from moelora_ops.adapters.config import AdapterConfig
from moelora_ops.testing.adapter_files import BASE, CONFIG, PREFIX, expert_delta, fused, load_files, per_expert


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


@pytest.mark.parametrize("version", ["0.19.0rc1", "0.19.1.dev0", "0.19.1.dev0@1a2b3c", "0.19", "", None, 19])
def test_a_version_that_is_not_settled_is_not_guessed(tmp_path: Path, version: Any) -> None:
    """Before the releases in which PEFT turned the factors around, a build may be on either side."""
    config = CONFIG | {"target_parameters": ["experts.down_proj"], "peft_version": version}
    tensors = {f"{PREFIX}1.mlp.experts.lora_A.weight": torch.randn(16, 12)}
    tensors[f"{PREFIX}1.mlp.experts.lora_B.weight"] = torch.randn(12, 16)
    with pytest.raises(AdapterError, match="must show its orientation: .* does not decide for mixtral"):
        load_files(tmp_path, (config, tensors), BASE | {"model_type": "mixtral", "moe_intermediate_size": 12})


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


@pytest.mark.parametrize(
    "keys", [("w2", r"1\.w2"), (r"1\.w2", "w2"), (r".*\.1\.w2", "w2"), ("1.w2", r"experts\.\d\.w2")], ids=str
)
def test_the_first_pattern_wins(keys: tuple[str, str]) -> None:
    """In the order of the file; a warning says that PEFT may have changed that order."""
    config = AdapterConfig.from_fields(CONFIG | {"alpha_pattern": {keys[0]: 4, keys[1]: 12}})
    with pytest.warns(UserWarning, match="alpha_pattern has keys with different values for model.layers.0.mlp.experts.1.w2"):
        assert config.alpha("model.layers.0.mlp.experts.1.w2") == 4
    assert config.alpha("model.layers.0.mlp.experts.2.w2") == (4 if keys[0] == "w2" else 12)


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


@pytest.mark.parametrize(
    ("alphas", "scaling"),
    [({r".*\.gate_up_proj": 16}, 8 / 2**0.5), ({}, 8 / 2), ({r".*\.gate_up_proj": 12}, 12 / 2)],
    ids=["doubled", "as it was", "another"],
)
def test_the_scale_of_a_converted_rslora_adapter(tmp_path: Path, alphas: dict[str, int], scaling: float) -> None:
    """Rank 2r with 2 alpha is PEFT's conversion of rank r with alpha: alpha / sqrt(r). Any other alpha is somebody's choice."""
    config, tensors = fused()  # gate_up of rank 4, alpha 8
    for layer in (1, 2):
        b = tensors[f"{PREFIX}{layer}.mlp.experts.base_layer.lora_B.weight"].view(20, 4, 4)  # out, j, e
        b[:10, 2:], b[10:, :2] = 0, 0
        for half, dim in (("A", 0), ("B", 1)):
            name = f"{PREFIX}{layer}.mlp.experts.lora_{half}.weight"
            tensors[name] = tensors[name].narrow(dim, 0, 8).contiguous()  # down of rank 2
    config |= {"r": 2, "use_rslora": True, "rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": alphas}
    adapter = load_files(tmp_path, (config, tensors))
    got = [float(adapter.layers[1][projection].scaling) for projection in ("gate", "up", "down")]
    assert got == pytest.approx([scaling, scaling, 8 / 2**0.5])


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
