"""Adapters that PEFT itself saves, random in everything that it lets one choose, against the weights that PEFT merges."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moelora_ops import load_adapter
from moelora_ops.adapters import LoraAdapter, MoeGeometry

peft = pytest.importorskip("peft", reason="PEFT writes the adapters of these tests", exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason="the models are transformers'", exc_type=ImportError)

COMMON: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
DENSE_FIRST = {"intermediate_size": 20, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "intermediate_size": 20, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 3, "intermediate_size": 12},
    "olmoe": {"num_experts": 4, "intermediate_size": 8},  # 2 I == H
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 12},
    "deepseek_v3": DENSE_FIRST
    | {"n_routed_experts": 4, "kv_lora_rank": 4, "q_lora_rank": 4, "n_shared_experts": 1, "num_key_value_heads": 2}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    "glm4_moe": DENSE_FIRST | {"n_routed_experts": 5},
    "llama4_text": {"num_local_experts": 4, "intermediate_size": 12, "intermediate_size_mlp": 20, "moe_layers": [1]},
    "nemotron_h": {"n_routed_experts": 4, "moe_intermediate_size": 16, "layers_block_type": ["moe", "full_attention"]}
    | {"moe_shared_expert_intermediate_size": 8, "n_group": 1, "topk_group": 1, "intermediate_size": 20},  # I == H
}
CONVERTED = ("mixtral", "qwen3_moe", "olmoe")  # whose v4 names PEFT rewrites, without dense layers or shared experts in the way
pytestmark = pytest.mark.filterwarnings("ignore:adapter_config field (rank|alpha)_pattern has keys")
quick = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def base_model(family: str) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    return transformers.AutoModelForCausalLM.from_config(config)


class V4Experts(nn.Module):
    """The modules of a transformers v4 model that matter: one nn.Linear for each expert and projection."""

    def __init__(self, geometry: MoeGeometry, names: tuple[str, str, str], block: str) -> None:
        super().__init__()
        hidden, inner = geometry.hidden_size, geometry.intermediate_size

        def expert() -> nn.Module:
            sizes = zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)))
            return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes})

        def layer() -> nn.Module:
            experts = nn.ModuleList(expert() for _ in range(geometry.num_experts))
            return nn.ModuleDict({block: nn.ModuleDict({"experts": experts})})

        self.model = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(geometry.num_layers))})


def randomize(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Signed values in lora_A and lora_B, exact in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)


def adapt(base: nn.Module, folder: Path, seed: int, dtype: torch.dtype, **config: Any) -> nn.Module:
    """Add a random adapter, save it, and return the model with the adapter merged, in fp64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config), autocast_adapter_dtype=False)
        randomize(model, seed, dtype)
        model.save_pretrained(folder)
        merged: nn.Module = model.double().merge_and_unload()
    return merged


def natural(family: str, name: str, change: Tensor) -> Tensor:
    """A change of a stored parameter as (E, out, in), rows [gate; up]."""
    if family in ("gpt_oss", "llama4_text"):
        change = change.transpose(1, 2)
    if family == "gpt_oss" and name == "gate_up_proj":
        change = torch.cat([change[:, 0::2], change[:, 1::2]], dim=1)
    return change


def check(got: Tensor | None, want: Tensor, where: str) -> None:
    if got is None:
        assert not want.any(), f"{where}: the adapter has nothing"
        return
    torch.testing.assert_close(
        got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()), msg=lambda m: f"{where}: {m}"
    )


ranks = st.integers(1, 5)
alphas = st.sampled_from([1, 3, 8, 16, 7.5])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def patterns(draw: st.DrawFn, keys: list[str], values: st.SearchStrategy[Any]) -> dict[str, Any]:
    # PEFT writes patterns in the order of the alphabet, and reads them so: the file does not keep another order.
    return dict(sorted(draw(st.dictionaries(st.sampled_from(keys), values, max_size=2)).items()))


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(data=st.data())
def test_fused_parameters(family: str, data: st.DataObject) -> None:
    """target_parameters of a v5 model: any of them, ranks and alphas by pattern, rsLoRA, attention beside it."""
    base = base_model(family)
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    layer = MoeGeometry.from_config(base.config).moe_layers[-1]
    block = "mixer" if family == "nemotron_h" else "feed_forward" if family == "llama4_text" else "mlp"
    targets = data.draw(st.lists(st.sampled_from([f"experts.{first}", "experts.down_proj"]), min_size=1, unique=True))
    if data.draw(st.booleans()):  # one layer by its path
        targets = [f"layers.{layer}.{block}.{target}" for target in targets]
    keys = [first, "down_proj", rf".*\.{first}", "experts.down_proj", rf"layers\.{layer}\.{block}\.experts\.{first}", "experts"]
    config = {
        "r": data.draw(ranks),
        "lora_alpha": data.draw(alphas),
        "use_rslora": data.draw(st.booleans()),
        "rank_pattern": data.draw(patterns(keys, ranks)),
        "alpha_pattern": data.draw(patterns(keys, alphas)),
        "target_parameters": targets,
        "target_modules": data.draw(st.sampled_from([["q_proj", "o_proj"], []])),
    }
    with tempfile.TemporaryDirectory() as folder:
        merged = adapt(base, Path(folder), data.draw(st.integers(0, 99)), data.draw(dtypes), **config)
        adapter = load_adapter(folder, base.config)
    stored = dict(base.named_parameters())
    seen = 0
    for name, parameter in merged.named_parameters():
        if parameter.dim() != 3:
            continue
        index, kind = int(name.split("layers.")[1].split(".")[0]), name.rpartition(".")[2]
        change = natural(family, kind, parameter.detach() - stored[name].detach().double())
        check(adapter.delta_weight(index, kind.removesuffix("_proj")), change, f"{name} of {config}")
        seen += 1
    assert seen and adapter.rank > 0
    assert all("q_proj" in name or "o_proj" in name for name in adapter.unused)
    assert bool(adapter.unused) == bool(config["target_modules"])


V4 = {"mixtral": (("w1", "w3", "w2"), "block_sparse_moe"), "qwen3_moe": (("gate_proj", "up_proj", "down_proj"), "mlp")}


@pytest.mark.parametrize("family", V4)
@quick
@given(data=st.data())
def test_one_linear_for_each_expert(family: str, data: st.DataObject) -> None:
    """target_modules of a v4 model: some experts, some projections, ranks and alphas by expert."""
    names, block = V4[family]
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], "mlp_only_layers": []})
    geometry = MoeGeometry.from_config(config)
    base = V4Experts(geometry, names, block)
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    experts = "|".join(map(str, data.draw(st.lists(st.integers(0, geometry.num_experts - 1), min_size=1, unique=True))))
    keys = [
        names[2],
        rf"experts\.1\.{names[0]}",
        rf"layers\.0\.{block}\.experts\..*",
        f"experts.0.{names[1]}",
        r".*\.[02]\.w?.*",
    ]
    options = {
        "r": data.draw(ranks),
        "lora_alpha": data.draw(alphas),
        "use_rslora": data.draw(st.booleans()),
        "rank_pattern": data.draw(patterns(keys, ranks)),
        "alpha_pattern": data.draw(patterns(keys, alphas)),
        "target_modules": data.draw(st.sampled_from([chosen, rf".*experts\.({experts})\.({'|'.join(chosen)})"])),
    }
    with tempfile.TemporaryDirectory() as folder:
        merged = adapt(base, Path(folder), data.draw(st.integers(0, 99)), data.draw(dtypes), **options)
        adapter = load_adapter(folder, config)
    for layer in range(geometry.num_layers):
        for name, projection in zip(names, ("gate", "up", "down")):
            stem = f"model.layers.{layer}.{block}.experts"
            change = torch.stack(
                [
                    merged.get_parameter(f"{stem}.{e}.{name}.weight").detach()
                    - base.get_parameter(f"{stem}.{e}.{name}.weight").detach().double()
                    for e in range(geometry.num_experts)
                ]
            )
            check(adapter.delta_weight(layer, projection), change, f"layer {layer} {name} of {options}")
    assert adapter.unused == []


def same(a: LoraAdapter, b: LoraAdapter) -> None:
    for layer in a.geometry.moe_layers:
        for projection in ("gate", "up", "down"):
            want, got = (adapter.delta_weight(layer, projection) for adapter in (a, b))
            assert want is not None and got is not None
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_rslora", [False, True], ids=["alpha/r", "rslora"])
@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_adapter_changes_what_the_original_changes(family: str, use_rslora: bool, tmp_path: Path) -> None:
    """PEFT turns a v4 adapter into a fused one of rank 2r. What it makes of rsLoRA is sqrt(2) too large; the file's meaning is
    not. Gate and up come back as two of rank r."""
    names, block = V4["mixtral" if family == "mixtral" else "qwen3_moe"]
    base = base_model(family)
    geometry = MoeGeometry.from_config(base.config)
    adapt(
        V4Experts(geometry, names, block),
        tmp_path / "v4",
        seed=3,
        dtype=torch.float32,
        r=3,
        lora_alpha=8,
        use_rslora=use_rslora,
        target_modules=rf".*layers\.({'|'.join(map(str, geometry.moe_layers))})\..*_proj"
        if len(geometry.moe_layers) < 2
        else names,
    )
    original = load_adapter(tmp_path / "v4", base.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "v4", autocast_adapter_dtype=False)
        model.save_pretrained(tmp_path / "v5")
    converted = load_adapter(tmp_path / "v5", base.config)
    same(original, converted)
    assert original.rank == converted.rank == 3 and len(converted.layers) == len(geometry.moe_layers)


@pytest.mark.parametrize("family", CONVERTED)
def test_v4_names_on_a_v5_model(family: str, tmp_path: Path) -> None:
    """PEFT trains one dense adapter of rank 2r then, and with rsLoRA the scale in the file is the one that it used."""
    base = base_model(family)
    names, _ = V4["mixtral" if family == "mixtral" else "qwen3_moe"]
    merged = adapt(base, tmp_path, 5, torch.float32, r=3, lora_alpha=8, use_rslora=True, target_modules=list(names))
    adapter = load_adapter(tmp_path, base.config)
    stored = dict(base.named_parameters())
    for name, parameter in merged.named_parameters():
        if parameter.dim() == 3:
            layer, kind = int(name.split("layers.")[1].split(".")[0]), name.rpartition(".")[2]
            change = parameter.detach() - stored[name].detach().double()
            check(adapter.delta_weight(layer, kind.removesuffix("_proj")), change, name)
    assert adapter.layers[geometry_layer(base)]["gate"].rank == 6


def geometry_layer(base: Any) -> int:
    return MoeGeometry.from_config(base.config).moe_layers[0]
