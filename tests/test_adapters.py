"""Adapters on disk: each file loads exactly, or is refused by the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moelora_ops import AdapterError, load_adapter
from moelora_ops.adapters import MoeGeometry

FIXTURES = Path(__file__).parent / "data" / "adapters"
# Formats of other tools, whose readers are still to come: refused until then, never read wrong.
NOT_YET = ("automodel_v4_export_rank_scaled", "sglang_shared_outer_gate_up", "unsloth_gptoss_4bit_names")
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
        _, layer, projection = key.split(".")
        got = adapter.delta_weight(int(layer), projection.removeprefix("delta_"))
        torch.testing.assert_close(torch.zeros_like(expected) if got is None else got, expected, rtol=0, atol=1e-5, msg=key)


LOADABLE = [n for n in NAMES if meta(n)["expect"] == "load" and n not in NOT_YET]


@pytest.mark.parametrize("name", LOADABLE)
def test_loads_the_weights_that_the_tool_merges(name: str) -> None:
    """Values are the tool's own merge (alpha / r, rsLoRA and patterns included); other tensors are listed, not dropped."""
    adapter = load(name)
    assert_expected(name, adapter)
    assert set(meta(name)["not_for_experts"]) <= set(adapter.unused)
    with_experts = meta(name)["tensor_roles"].get("experts", 0) > 0
    assert (adapter.rank > 0) == with_experts


@pytest.mark.parametrize("name", [n for n in NAMES if n not in LOADABLE])
def test_refuses(name: str) -> None:
    """Damaged files, other methods than LoRA, adapters of other bases, and formats without a reader."""
    with pytest.raises(AdapterError, match=".{20}"):
        load(name)


@pytest.mark.parametrize("name", [n for n in NAMES if meta(n).get("options_that_resolve") and n not in NOT_YET])
def test_says_when_the_file_cannot_show_its_orientation(name: str) -> None:
    """in == out, one projection, no peft_version: refused, and the message says why."""
    with pytest.raises(AdapterError, match="orientation: in and out are both 32.*peft_version, got None"):
        load(name)


def test_every_copied_fixture_is_one_or_the_other() -> None:
    """No fixture is left out by a filter above."""
    assert len(NAMES) > 60 and len(LOADABLE) > 30 and set(NOT_YET) < set(NAMES)


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
        ({"num_experts": None}, "config field num_local_experts or n_routed_experts or num_experts must be given"),
        ({"hidden_size": None}, "config field hidden_size must be given"),
        ({"hidden_size": "12"}, "config field hidden_size must be an int >= 1, got '12'"),
        ({"moe_intermediate_size": 0}, "config field moe_intermediate_size or intermediate_size must be an int >= 1, got 0"),
        ({"num_hidden_layers": None}, "config field num_hidden_layers must be given"),
        ({"mlp_only_layers": 3}, "config field mlp_only_layers must be a list"),
        ({"model_type": 3}, "config field model_type must be a string"),
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


def test_bad_arguments() -> None:
    """ValueError or AdapterError by name."""
    with pytest.raises(ValueError, match="^b_packing must be"):
        load("perexp_qwen3moe", b_packing="expert_minor")
    with pytest.raises(ValueError, match="^max_rank must be >= 1"):
        load("perexp_qwen3moe", max_rank=0)
    with pytest.raises(AdapterError, match="^config must be a transformers config, a dict or a path"):
        load_adapter(FIXTURES / "perexp_qwen3moe", 3)
