"""transformers' experts classes, one of each layout and activation: proved, laid out, and computed like their own forward."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")

from moelora_ops import LoraPool  # noqa: E402
from moelora_ops.integrations import _experts  # noqa: E402
from moelora_ops.integrations._experts import Activation  # noqa: E402
from moelora_ops.integrations._sequences import Sequences  # noqa: E402

SIZES = dict(
    hidden_size=32, intermediate_size=24, moe_intermediate_size=24, num_experts=6, num_local_experts=6, n_routed_experts=6,
    moe_num_experts=6, hidden_act="silu", hidden_activation="gelu_pytorch_tanh", mlp_hidden_act="relu2", moe_latent_size=None,
    swiglu_limit=2.0, swiglu_alpha=1.5, expert_intermediate_size=24, _experts_implementation="eager",
)  # fmt: skip
CASES = {
    "mixtral.MixtralExperts": Activation("silu", True),
    "qwen3_moe.Qwen3MoeExperts": Activation("silu", True),
    "gemma4.Gemma4TextExperts": Activation("gelu_tanh", True),
    "gpt_oss.GptOssExperts": Activation("swigluoai", True, True),
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": Activation("swigluoai", True, False),
    "minimax_m3_vl.MiniMaxM3VLExperts": Activation("swigluoai", True, False, 1.5, 2.0),
    "deepseek_v4.DeepseekV4Experts": Activation("silu", True, False, 1.702, 2.0),
    "aria.AriaExperts": Activation("silu", True),
    "nemotron_h.NemotronHExperts": Activation("relu2", False),
}


class Model(nn.Module):
    """A decoder of one layer that is all experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].experts = experts


def make(path: str) -> Any:
    module, _, name = path.partition(".")
    try:
        source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        experts = getattr(source, name)(SimpleNamespace(**SIZES))
    except (ImportError, AttributeError) as missing:
        pytest.skip(f"transformers {transformers.__version__} has no such class: {missing}")
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.requires_grad_(False).normal_(generator=generator)
    return experts


@pytest.mark.parametrize("path", CASES)
def test_like_its_own_forward(path: str) -> None:
    """The activation is the one that the class computes, and so are the values; parameters keep shapes and values."""
    experts = make(path)
    before = {name: value.clone() for name, value in experts.state_dict().items()}
    found = _experts.find(Model(experts))
    activation = _experts.prove_activation(found)
    expected = CASES[path]
    if hasattr(experts, "alpha"):  # some versions have the numbers in the config, some in the class
        expected = replace(expected, alpha=experts.alpha, limit=experts.limit)
    assert activation == expected
    geometry = _experts.geometry(Model(experts), found, activation)
    assert (geometry.num_experts, geometry.hidden_size, geometry.intermediate_size) == (6, 32, 24)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 32, generator=generator)
    weights, ids = torch.randn(9, 6, generator=generator).softmax(-1).topk(2)
    own = experts(x, ids, weights)
    _experts.lay_out(experts, natural_order=True)
    pool = LoraPool.from_config(geometry, max_loras=1, max_rank=4, dtype=torch.float32)
    served = _experts.Served(activation, pool.layer(0), Sequences(1, torch.device("cpu")))
    got = served.run(experts, x, ids, weights)
    assert (got - own).norm() < 1e-5 * own.norm()
    for name, value in experts.state_dict().items():
        assert torch.equal(value, before[name]), name
    _experts.lay_out(experts, natural_order=False)
    assert all(parameter.is_contiguous() for parameter in experts.parameters())


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu2", "silu"])
def test_activations_by_value(name: str) -> None:
    """Activations are told apart by their values, whatever the module is called."""
    experts = make("mixtral.MixtralExperts")
    experts.act_fn = transformers.activations.ACT2FN[name]
    assert _experts.prove_activation({0: experts}).activation == {"gelu_pytorch_tanh": "gelu_tanh"}.get(name, name)


@pytest.mark.parametrize("name", ["quick_gelu", "relu", "clamped after"])
def test_other_activations_are_refused(name: str) -> None:
    """An activation that is close to one of ours, or has another clamp, is not taken for it."""
    experts = make("mixtral.MixtralExperts")
    if name in transformers.activations.ACT2FN:
        experts.act_fn = transformers.activations.ACT2FN[name]
    else:
        experts.act_fn = nn.Sequential(nn.SiLU(), nn.Hardtanh(-7.0, 7.0))  # Step-3.7 clamps after the activation, not before
    with pytest.raises(_experts.UnsupportedError, match="its values are those of none"):
        _experts.prove_activation({0: experts})
