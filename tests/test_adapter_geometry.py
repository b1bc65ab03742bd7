"""Which layers of a base have routed experts, and their sizes: against the models that transformers builds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moelora_ops import AdapterError
from moelora_ops.adapters import MoeGeometry

transformers = pytest.importorskip("transformers", reason="the models are transformers'", exc_type=ImportError)

# Each rule of a family once: fields of its config that differ from the default.
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("afmoe", {"num_dense_layers": 2}),
    ("aria_text", {}),
    ("bailing_hybrid", {}),
    ("deepseek_v2", {"first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 1}),
    ("deepseek_v32", {}),
    ("deepseek_v4", {}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": 6}),
    ("exaone_moe", {}),
    ("flex_olmo", {}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
    ("glm4_moe", {"first_k_dense_replace": 3}),
    ("glm4_moe_lite", {}),
    ("glm4v_moe", {}),
    ("gpt_oss", {}),
    ("granitemoe", {}),
    ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 2}),
    ("kimi_linear", {}),
    ("llama4_text", {}),
    ("llama4_text", {"moe_layers": [1, 4]}),
    ("mimo_v2_flash", {}),
    ("minimax", {}),
    ("minimax_m2", {}),
    ("mixtral", {}),
    ("muse_spark", {}),
    ("nemotron_h", {"layers_block_type": ["moe", "full_attention", "moe"]}),
    ("nemotron_h", {"layers_block_type": ["full_attention", "moe"], "moe_latent_size": 64}),
    ("olmoe", {}),
    ("openai_privacy_filter", {}),
    ("phimoe", {}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen3_5_moe", {}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2}),
    ("qwen3_next", {"mlp_only_layers": [1]}),
    ("qwen3_omni_moe_thinker", {}),
    ("qwen3_vl_moe", {}),
    ("step3p7", {}),
]


def build(model_type: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """A config and its model, without memory for the weights."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    for build_model in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        try:
            with torch.device("meta"):
                return config, build_model.from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise AssertionError(model_type)


@pytest.mark.parametrize(("model_type", "fields"), CONFIGS, ids=str)
def test_the_geometry_is_that_of_the_model(model_type: str, fields: dict[str, Any]) -> None:
    """Layers, experts, sizes, storage and order of rows, from the config alone."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config, model = build(model_type, fields)
    layers = {}
    for name, module in model.named_modules():
        match = re.search(r"layers\.(\d+)\.(?:\w+\.)?experts$", name)
        if match and hasattr(module, "down_proj"):
            layers[int(match[1])] = module
    geometry = MoeGeometry.from_config(config)
    assert geometry.moe_layers == tuple(sorted(layers))
    experts = next(iter(layers.values()))
    gated = hasattr(experts, "gate_up_proj")
    first = experts.gate_up_proj if gated else experts.up_proj
    transposed = bool(getattr(experts, "is_transposed", "llama4" in model_type))
    shapes = [(p.shape[0], p.shape[2], p.shape[1]) if transposed else tuple(p.shape) for p in (first, experts.down_proj)]
    size, inner, slices = geometry.hidden_size, geometry.intermediate_size, 2 if gated else 1
    assert shapes == [(geometry.num_experts, slices * inner, size), (geometry.num_experts, size, inner)]
    assert (geometry.gated, geometry.transposed) == (gated, transposed)
    assert geometry.interleaved == (not getattr(experts, "is_concatenated", True))
    assert geometry == MoeGeometry.from_config(config.to_dict())


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "longcat_flash", "ernie4_5_vl_moe"])
def test_a_base_that_we_do_not_serve_is_refused(model_type: str) -> None:
    """No experts, or experts of several kinds in one layer."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with pytest.raises(AdapterError, match="^config (field )?.*(must be|must have)"):
        MoeGeometry.from_config(transformers.AutoConfig.for_model(model_type))
