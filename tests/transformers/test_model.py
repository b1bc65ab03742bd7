"""What `enable` leaves alone in a model, what it follows, and which models it refuses."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
peft = pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")

from moelora_ops import UnsupportedError  # noqa: E402
from moelora_ops.integrations import _experts  # noqa: E402
from moelora_ops.integrations.transformers import enable  # noqa: E402

stored_both_ways = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"], indirect=True)


@stored_both_ways
def test_the_model_stays_as_it_was(family: Any, tmp_path: Path) -> None:
    """Names, shapes and values of the state, modules, buffers and saved files do not change; nor does memory."""

    def described() -> dict[str, Any]:
        model = family.model
        return {
            "state": {name: value.clone() for name, value in model.state_dict().items()},
            "names": [name for names in (model.named_modules(), model.named_buffers()) for name, _ in names],
            "bytes": sum(p.untyped_storage().nbytes() for p in model.parameters()),
        }

    before = described()
    family.model.save_pretrained(tmp_path / "before")
    family.enable("a", "b", "c")
    after = described()
    assert before["names"] == after["names"] and before["bytes"] == after["bytes"]
    assert list(before["state"]) == list(after["state"])
    assert all(torch.equal(after["state"][name], value) for name, value in before["state"].items())
    family.model.save_pretrained(tmp_path / "after")
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == sorted(p.name for p in (tmp_path / "before").iterdir())
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes(), name
    family.model.load_state_dict(before["state"])


def live_bytes() -> int:
    """Memory of all tensors that anything refers to, each storage once."""
    gc.collect()
    storages = (t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@stored_both_ways
def test_no_second_copy_of_the_weights(family: Any) -> None:
    """Weights in transposed storage are turned in place: what is new in memory is the slots, and closing frees them."""
    before = live_bytes()
    enabled = family.enable(max_loras=1, max_rank=1, max_sequences=8, linears=())
    slots = sum(t.nbytes for layer in range(2) for t in vars(enabled.pool.layer(layer)).values() if isinstance(t, Tensor))
    assert 0 < live_bytes() - before <= slots + 1000
    enabled.close()
    del enabled
    assert live_bytes() - before <= 1000


def test_one_parameter_at_a_time_exists_twice(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller holds an old copy of a turned weight while the next layer is turned: live memory is the same after each."""
    live: list[int] = []
    lay_out = _experts.lay_out

    def watched(experts: Any, **order: bool) -> None:
        lay_out(experts, **order)
        live.append(live_bytes())

    monkeypatch.setattr(_experts, "lay_out", watched)
    enabled = enable(tiny.make_model("gpt_oss"), max_loras=1, max_rank=1, linears=())
    assert enabled and live == [live_bytes()] * 2


@stored_both_ways
def test_casts_and_new_weights_are_followed(family: Any) -> None:
    """A cast or replaced weights after `enable`: loaded adapters go with the model."""
    enabled, ids = family.enable("a", "b", "c"), family.prompts(2)
    with enabled.adapters(["a", None]):
        expected = family.model(ids).logits
    family.model.to(torch.bfloat16)
    base = family.model(ids).logits
    with enabled.adapters(["a", None]):
        got = family.model(ids).logits
    assert got.dtype == torch.bfloat16 and torch.equal(got[1], base[1])
    effect = (expected - base)[0].norm()
    assert (got - expected)[0].norm() < 0.1 * effect  # bf16 throughout two layers
    state = {name: value.float() for name, value in family.model.state_dict().items()}
    family.model.to(torch.float32).load_state_dict(state, assign=True)  # contiguous storage, as a checkpoint has
    enabled.refresh()
    with enabled.adapters(["a", None]):
        assert (family.model(ids).logits - got)[0].norm() < 0.1 * effect


def test_replaced_storage_is_an_error_not_a_copy(tiny: Any) -> None:
    """Weights that came back in transposed storage are refused until refresh() has laid them out once."""
    model, ids = tiny.make_model("gpt_oss"), torch.tensor([[2, 3, 4]])
    enabled = enable(model, max_loras=1, max_rank=4)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj.data = experts.down_proj.data.contiguous()
    with pytest.raises(UnsupportedError, match="down_proj must be stored with contiguous inputs.*call refresh"):
        model(ids)
    enabled.refresh()
    model(ids)


@stored_both_ways
def test_inside_inference_mode(family: Any) -> None:
    """Enabled, loaded and used inside inference_mode as well as outside, in either order."""
    ids = family.prompts(2)
    with torch.inference_mode():
        enabled = family.enable("a", "b")
        with enabled.adapters(["a", "b"]):
            expected = family.model(ids).logits
    with enabled.adapters(["a", "b"]):
        assert torch.equal(family.model(ids).logits, expected)
    enabled.load(family.folder / "c", "a")
    family.model.load_state_dict(family.merged["b"].state_dict())
    with torch.inference_mode(), enabled.adapters(None):
        logits = family.model(ids).logits
    own = family.merged["b"](ids).logits
    assert (logits - own).norm() < 1e-5 * own.norm()
    with torch.enable_grad():
        assert family.model.model.layers[0].mlp.experts.down_proj.requires_grad


def test_copies_share_adapters(family: Any) -> None:
    """A deep copy of the model has weights of its own, and the adapters of the block that runs."""
    enabled = family.enable("a", "b", "c")
    twin, ids = copy.deepcopy(family.model), family.prompts(2)
    with enabled.adapters(["a", "b"]):
        assert torch.equal(twin(ids).logits, family.model(ids).logits)
    other = type(family.model)(family.model.config).eval()  # from the same config object, not enabled
    assert torch.isfinite(other(ids).logits).all()


class TestUnsupported:
    """Models that cannot be served say what is missing, and stay as they are."""

    def refused(self, model: nn.Module, message: str, kind: type[Exception] = UnsupportedError) -> None:
        before = getattr(getattr(model, "config", None), "_experts_implementation", None)
        with pytest.raises(kind, match=message):
            enable(model, max_loras=1, max_rank=4)
        assert getattr(getattr(model, "config", None), "_experts_implementation", None) == before
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_no_model(self) -> None:
        self.refused(nn.Linear(2, 2), "model must be a PreTrainedModel of transformers v5, got Linear", TypeError)

    def test_dense(self, tiny: Any) -> None:
        config = transformers.LlamaConfig(**{**tiny.SIZES, "num_experts_per_tok": None})
        self.refused(transformers.LlamaForCausalLM(config), "must have routed experts, got a LlamaForCausalLM")

    def test_own_forward(self, tiny: Any) -> None:
        config = transformers.Llama4TextConfig(**tiny.SIZES, num_local_experts=2, intermediate_size_mlp=32)
        model = transformers.AutoModelForCausalLM.from_config(config)
        self.refused(model, r"Llama4TextExperts\) must go through transformers' ExpertsInterface")

    def test_peft(self, family: Any) -> None:
        model = peft.PeftModel.from_pretrained(family.model, family.folder / "a")
        with pytest.raises(UnsupportedError, match="without PEFT adapters"):
            enable(model, max_loras=1, max_rank=4)
        with pytest.raises(UnsupportedError, match="without PEFT adapters"):
            enable(model.base_model.model, max_loras=1, max_rank=4)
        del family.model.peft_config
        with pytest.raises(UnsupportedError, match="without PEFT adapters, got model.layers.0"):  # `unload` leaves some behind
            enable(family.model, max_loras=1, max_rank=4)

    def test_twice(self, family: Any) -> None:
        enabled = family.enable(max_loras=1, max_rank=4)
        with pytest.raises(ValueError, match="must not be enabled already"):
            family.enable(max_loras=1, max_rank=4)
        enabled.close()
        family.enable(max_loras=1, max_rank=4)

    @pytest.mark.parametrize(
        ("attribute", "value", "message"),
        [
            ("has_post_expert_norm", True, "no norm after its experts"),
            ("_is_expert_parallel", True, "expert parallelism is not supported"),
            ("act_fn", nn.Tanh(), "activation of layer 0's Qwen3MoeExperts must be one of silu, .* those of none"),
            ("has_bias", True, "must have a parameter gate_up_proj_bias, got NoneType"),
        ],
    )
    def test_experts(self, family: Any, attribute: str, value: Any, message: str) -> None:
        setattr(family.model.model.layers[0].mlp.experts, attribute, value)
        self.refused(family.model, message)

    def test_layers_differ(self, family: Any) -> None:
        experts = family.model.model.layers[1].mlp.experts
        experts.act_fn = nn.GELU()
        self.refused(family.model, "all layers must have one activation, got .*silu.* from layer 1, .*gelu")
        experts.act_fn = nn.SiLU()
        experts.down_proj = nn.Parameter(torch.zeros(6, 32, 16))
        experts.gate_up_proj = nn.Parameter(torch.zeros(6, 32, 32))
        self.refused(family.model, r"one shape, .*layer 0: .*\(6, 32, 24\).*layer 1: .*\(6, 32, 16\)")

    def test_quantised_and_meta(self, family: Any, tiny: Any) -> None:
        experts = family.model.model.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
        self.refused(family.model, "down_proj must be float32 or bfloat16 or float16, got int8: dequantise")
        self.refused(tiny.make_model("mixtral").to("meta"), "must be on a cpu or cuda device, got meta")

    @pytest.mark.parametrize("name", ["max_loras", "max_rank", "max_sequences"])
    def test_sizes(self, family: Any, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be"):
            family.enable(**{name: 0})


def test_linear_layers_with_a_forward_of_their_own(tiny: Any) -> None:
    """PhiMoE's router is an nn.Linear that returns choices: it is left to the base, and the model runs."""
    config = transformers.PhimoeConfig(**{**tiny.SIZES, "num_local_experts": 4})
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.tensor([[2, 3, 4]])
    expected = model(ids).logits
    enabled = enable(model, max_loras=1, max_rank=4)
    assert "model.layers.0.self_attn.q_proj" in enabled._linear_modules
    assert not any("router" in name or name.endswith("gate") for name in enabled._linear_modules)
    assert (model(ids).logits - expected).norm() < 1e-4 * expected.norm()
