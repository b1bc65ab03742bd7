"""Adapters on disk: each file loads exactly, or is refused by the name of what is wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moelora_ops import AdapterError, FusedMoEWithLoRA, LoraPool, load_adapter
from moelora_ops.adapters import MoeGeometry

FIXTURES = Path(__file__).parent / "data" / "adapters"
NAMES = sorted(p.name for p in FIXTURES.iterdir())


def meta(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FIXTURES / name / "meta.json").read_text())
    return result


def load(name: str, **options: Any) -> Any:
    options = (meta(name).get("options_needed") or {}) | {"max_rank": meta(name).get("pool_max_rank")} | options
    return load_adapter(FIXTURES / name, FIXTURES / name / "base_config.json", **options)


def assert_expected(name: str, adapter: Any) -> None:
    """Every dense change of the fixture, to 1e-5; what the file says nothing about is zero there."""
    for key, expected in load_file(FIXTURES / name / "expected.safetensors").items():
        _, layer, *module, projection = key.split(".")
        if module or not projection.startswith("delta_"):
            continue
        got = adapter.delta_weight(int(layer), projection.removeprefix("delta_"))
        torch.testing.assert_close(torch.zeros_like(expected) if got is None else got, expected, rtol=0, atol=1e-5, msg=key)


LOADABLE = [n for n in NAMES if meta(n)["expect"] == "load"]


@pytest.mark.parametrize("name", LOADABLE)
def test_loads_the_weights_that_the_tool_merges(name: str) -> None:
    """Values are the tool's own merge (alpha / r, rsLoRA and patterns included); other tensors are listed, not dropped."""
    with_experts = meta(name)["tensor_roles"].get("experts", 0) > 0
    with contextlib.nullcontext() if with_experts else pytest.warns(UserWarning, match="no tensors for routed experts"):
        adapter = load(name)
    assert_expected(name, adapter)
    assert set(meta(name)["not_for_experts"]) <= set(adapter.unused)
    assert (adapter.rank > 0) == with_experts


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "perexp_deepseekv3_shared_dense": {"activation": "silu"},
    "gptoss_p0212_attention": {"activation": "swigluoai", "swiglu_limit": 7.0},
    "nemotronh_latent": {"activation": "relu2"},
    "llama4_p0212": {"activation": "silu", "apply_router_weight_on_input": True},
    "fused_gemma4_path": {"activation": "gelu_tanh"},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_layer_computes_what_the_model_computed(name: str) -> None:
    """Disk -> adapter -> pool -> layer: the outputs of the model itself with the adapter active, and of nobody's without it."""
    adapter, recorded = load(name), load_file(FIXTURES / name / "expected.safetensors")
    pool = LoraPool.from_config(FIXTURES / name / "base_config.json", max_loras=2, max_rank=8, dtype=torch.float32)
    pool.load(adapter, 1)
    geometry = adapter.geometry
    for layer in geometry.moe_layers:
        base = {key.removeprefix(f"layers.{layer}."): t for key, t in recorded.items() if key.startswith(f"layers.{layer}.")}
        w13, w2 = base["gate_up_proj" if geometry.gated else "up_proj"], base["down_proj"]
        if geometry.transposed:
            w13, w2 = w13.mT.contiguous(), w2.mT.contiguous()
        biases = {"w13_bias": base.get("gate_up_proj_bias"), "w2_bias": base.get("down_proj_bias")}
        options = ACTIVATIONS[name] | {"gated": geometry.gated, "interleaved": geometry.interleaved}
        module = FusedMoEWithLoRA(w13, w2, pool.layer(layer), **biases, **options)
        inputs = base["x"], base["topk_weights"].contiguous(), base["topk_ids"]
        got = module(*inputs, torch.ones(len(base["x"]), dtype=torch.int32))
        torch.testing.assert_close(got, base["y"], rtol=1e-5, atol=1e-5)
        without = module(*inputs, torch.zeros(len(base["x"]), dtype=torch.int32))  # slot 0 is empty
        assert (without - base["y"]).abs().max() > 1e-2


@pytest.mark.parametrize("name", [n for n in NAMES if n not in LOADABLE])
def test_refuses(name: str) -> None:
    """Damaged files, other methods than LoRA, adapters of other bases."""
    with pytest.raises(AdapterError, match=".{20}"):
        load(name)


@pytest.mark.parametrize("name", [n for n in NAMES if "orientation" in (meta(n).get("options_that_resolve") or {})])
def test_the_option_decides_where_the_file_cannot(name: str) -> None:
    """in == out, one projection, no peft_version: refused, and the message names the option that then loads the file."""
    right: str = meta(name)["options_that_resolve"]["orientation"]
    with pytest.raises(
        AdapterError, match='both 32, .*peft_version, got None.* the option orientation="natural" or "reversed"'
    ):
        load(name)
    geometry = MoeGeometry.from_config(FIXTURES / name / "base_config.json")
    wrong = "reversed" if right == "natural" else "natural"
    deltas = {option: load(name, orientation=option) for option in (right, wrong)}
    key = "down" if geometry.model_type == "gpt_oss" else "gate_up"
    layer = geometry.moe_layers[0]
    if (FIXTURES / name / "expected.safetensors").exists():
        assert_expected(name, deltas[right])
    mine, other = (deltas[option].layers[layer] for option in (right, wrong))
    assert mine.keys() == other.keys() and deltas[right].delta_weight(layer, key) is not None
    assert not torch.equal(deltas[right].delta_weight(layer, key), deltas[wrong].delta_weight(layer, key))


@pytest.mark.parametrize(
    ("name", "orientation"), [("fused_mixtral_p0212", "reversed"), ("square_olmoe_both_p0171", "natural")], ids=str
)
def test_an_option_that_the_file_contradicts_is_refused(name: str, orientation: str) -> None:
    """What a shape proves, its own or a sibling's, is not overruled."""
    with pytest.raises(
        AdapterError, match="^orientation must be (natural|reversed) or None for this file, got the other: see the shape"
    ):
        load(name, orientation=orientation)


def test_every_fixture_is_one_or_the_other() -> None:
    """No fixture is left out by a filter above."""
    assert len(NAMES) == 99 and len(LOADABLE) == 62


@pytest.mark.parametrize("name", LOADABLE)
def test_geometry_is_read_from_the_config(name: str) -> None:
    """Sizes and MoE layers of every family here, from the config's path, its dict, and an object with to_dict."""
    path = FIXTURES / name / "base_config.json"
    geometry, dims, layout = MoeGeometry.from_config(path), meta(name)["dims"], meta(name)["base_layout"]
    sizes = geometry.num_experts, geometry.intermediate_size, list(geometry.moe_layers)
    assert sizes == (dims["num_experts"], dims["intermediate"], dims["moe_layers"])
    assert geometry.hidden_size == (24 if name == "nemotronh_latent" else dims["hidden"])  # moe_latent_size
    assert geometry.interleaved == (layout == "transposed_interleaved")
    assert geometry.transposed == layout.startswith("transposed") and geometry.gated == (layout != "non_gated")
    fields = json.loads(path.read_text())
    holder = type("Config", (), {"to_dict": lambda self: fields})()
    assert MoeGeometry.from_config(fields) == geometry == MoeGeometry.from_config(holder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "config field num_local_experts or n_routed_experts or num_experts or .* must be given"),
        ({"hidden_size": None}, "config field hidden_size must be given"),
        ({"hidden_size": "12"}, "config field hidden_size must be an int >= 1, got '12'"),
        ({"moe_intermediate_size": 0}, "config field moe_intermediate_size or intermediate_size must be an int >= 1, got 0"),
        ({"num_hidden_layers": None}, "config field num_hidden_layers must be given"),
        ({"mlp_only_layers": 3}, "config field mlp_only_layers must be a list"),
        ({"model_type": 3}, "config field model_type must be a string"),
        ({"model_type": "longcat_flash"}, "config field model_type must be of a family with equal experts"),
        ({"enable_moe_block": False}, "config must be of a model with routed experts, got none in its 2 layers"),
        ({"mlp_only_layers": [0, 1]}, "config must be of a model with routed experts"),
    ],
)
def test_a_bad_base_config_is_named(changes: dict[str, Any], message: str) -> None:
    """The field that is missing or wrong."""
    base = {"num_hidden_layers": 2, "num_experts": 4, "hidden_size": 8, "moe_intermediate_size": 4, "intermediate_size": None}
    assert MoeGeometry.from_config(base).moe_layers == (0, 1)
    with pytest.raises(AdapterError, match=f"^{message}"):
        MoeGeometry.from_config(base | changes)


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [2]}, (0, 1, 3, 4, 5)),
        ({"mlp_only_layers": [2, [3]]}, (0, 1, 3, 4, 5)),  # nonsense beside it is no crash
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 3}, (3, 4, 5)),
        ({"model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", *["sparse"] * 5]}, (1, 2, 3, 4, 5)),
        ({"moe_layer_freq": [0, 0, 1, 1, 0, 1]}, (2, 3, 5)),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"model_type": "llama4_text", "moe_layers": [0, 5]}, (0, 5)),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*ME-"}, (1, 4)),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    """The rules of the families, on six layers."""
    base = {"num_hidden_layers": 6, "num_experts": 4, "hidden_size": 8, "moe_intermediate_size": 4}
    assert MoeGeometry.from_config(base | fields).moe_layers == moe_layers


def test_the_config_of_a_multimodal_model() -> None:
    """The part that has the experts counts, however deep it is; a part without any is another tower's."""
    inner = {"num_hidden_layers": 2, "num_experts": 4, "hidden_size": 8, "moe_intermediate_size": 4}
    want = MoeGeometry.from_config(inner)
    for config in (
        {"hidden_size": 99, "text_config": inner},
        {"thinker_config": {"vision_config": {"hidden_size": 1}, "text_config": inner}},
        inner | {"text_config": {"hidden_size": 99, "num_hidden_layers": 9}},
    ):
        assert MoeGeometry.from_config(config) == want


def test_bad_arguments() -> None:
    """ValueError or AdapterError by name."""
    with pytest.raises(ValueError, match="^b_packing must be"):
        load("perexp_qwen3moe", b_packing="expert_minor")
    with pytest.raises(ValueError, match='^orientation must be "natural", "reversed" or None'):
        load("perexp_qwen3moe", orientation="transposed")
    with pytest.raises(ValueError, match="^max_rank must be >= 1"):
        load("perexp_qwen3moe", max_rank=0)
    with pytest.raises(AdapterError, match="^config must be a transformers config, a dict or a path"):
        load_adapter(FIXTURES / "perexp_qwen3moe", 3)
