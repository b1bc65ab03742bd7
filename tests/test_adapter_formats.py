"""One adapter in every format: the same changes come back, in the sizes in which several layouts look alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moelora_ops import AdapterError, load_adapter
from moelora_ops.adapters import MoeGeometry
from moelora_ops.testing import adapter_formats as formats
from moelora_ops.testing.adapter_formats import Pairs, Written, dense, random_pairs, write_all

Writer = Callable[[Pairs, MoeGeometry, int], Written]
ONE_A = "gate and up have one A"
FORMATS: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "linear": (formats.as_linear, ()),
    "w123": (formats.as_w123, ()),
    "fused linear": (formats.as_fused_linear, (ONE_A, "gated")),
    "stacked": (formats.as_stacked, ()),
    "stacked gate_up": (formats.as_stacked_gate_up, (ONE_A, "gated", "halves")),
    "stacked gate_up, two A": (formats.as_stacked_gate_up, ("gated", "halves")),
    "natural": (formats.as_parameters, (ONE_A,)),
    "reversed": (functools.partial(formats.as_parameters, natural=False), (ONE_A,)),
    "natural, expert major": (functools.partial(formats.as_parameters, expert_major=True), (ONE_A,)),
    "reversed, expert major": (functools.partial(formats.as_parameters, natural=False, expert_major=True), (ONE_A,)),
    "automodel": (formats.as_automodel, (ONE_A,)),
    "ktransformers": (formats.as_ktransformers, ()),
    "mlx": (formats.as_mlx, ()),
    "mlx, flat": (functools.partial(formats.as_mlx, flat=True), ()),
}
SHARED = {
    "stacked": formats.as_stacked,
    "stacked gate_up, two A": formats.as_stacked_gate_up,
    "mixed": formats.as_mixed,
    "linear": formats.as_linear,
    "ktransformers": formats.as_ktransformers,
}


def geometry(model_type: str, num_experts: int, hidden: int, inner: int) -> MoeGeometry:
    config = {"model_type": model_type, "num_hidden_layers": 2, "num_experts": num_experts, "hidden_size": hidden}
    config |= {"moe_intermediate_size": inner, "moe_layers": [0, 1], "layers_block_type": ["moe", "moe"]}
    return MoeGeometry.from_config(config)


BASES = {
    "plain": (geometry("qwen3_moe", 5, 24, 14), 3),
    "H == I": (geometry("qwen3_moe", 4, 16, 16), 3),
    "H == 2 I": (geometry("olmoe", 4, 16, 8), 3),
    "r == E": (geometry("mixtral", 4, 20, 12), 4),
    "E r == H": (geometry("qwen3_moe", 4, 12, 10), 3),
    "E r == H == 2 I, r == I": (geometry("qwen3_moe", 2, 16, 8), 8),
    "r == E == H == I": (geometry("qwen3_moe", 4, 4, 4), 4),
    "r == 1": (geometry("qwen3_moe", 4, 12, 10), 1),
    "one expert": (geometry("qwen3_moe", 1, 12, 10), 2),
    "gpt-oss": (geometry("gpt_oss", 4, 20, 12), 3),
    "gpt-oss, H == I": (geometry("gpt_oss", 4, 16, 16), 2),
    "llama4": (geometry("llama4_text", 4, 20, 12), 3),
    "not gated": (geometry("nemotron_h", 4, 20, 12), 3),
}


def fits(needs: tuple[str, ...], base: MoeGeometry) -> bool:
    return (base.gated or "gated" not in needs) and not (base.interleaved and "halves" in needs)


CASES = [(name, base) for name, (_, needs) in FORMATS.items() for base, (g, _) in BASES.items() if fits(needs, g)]


def assert_changes(adapter: Any, pairs: Pairs, base: MoeGeometry, scaling: float) -> None:
    assert sorted(adapter.layers) == list(base.moe_layers)
    for layer, projections in pairs.items():
        assert adapter.layers[layer].keys() == projections.keys()
        for projection in projections:
            want = dense(pairs, base, layer, projection, scaling)
            torch.testing.assert_close(adapter.delta_weight(layer, projection).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "base_name"), CASES)
def test_every_format_in_every_shape(name: str, base_name: str, tmp_path: Path) -> None:
    """scaling * B A of each expert and projection; only what the file cannot hold in another shape."""
    (writer, needs), (base, rank) = FORMATS[name], BASES[base_name]
    pairs = random_pairs(base, rank, one_a=ONE_A in needs)
    written = writer(pairs, base, rank)
    adapter = load_adapter(write_all(tmp_path, written), base, **written[2])
    assert_changes(adapter, pairs, base, 7 / rank)
    assert adapter.rank == rank


@pytest.mark.parametrize(
    ("name", "base_name"),
    [
        (name, base)
        for name in SHARED
        for base in ("plain", "H == I", "r == E == H == I", "not gated")
        if fits(FORMATS.get(name, ("", ()))[1], BASES[base][0])
    ],
)
def test_shared_outer_factors_stay_one_tensor(name: str, base_name: str, tmp_path: Path) -> None:
    """A of gate and up and B of down, once for all experts: dimension 0 is 1, also where the file has copies."""
    base, rank = BASES[base_name]
    pairs = random_pairs(base, rank, shared_outer=True)
    adapter = load_adapter(write_all(tmp_path, SHARED[name](pairs, base, rank)), base)
    assert_changes(adapter, pairs, base, 7 / rank)
    for projections in adapter.layers.values():
        for projection, lora in projections.items():
            outer = lora.b if projection == "down" else lora.a
            assert len(outer) == 1
    assert adapter.shared_outer


def test_equal_factors_of_some_experts_stay_per_expert(tmp_path: Path) -> None:
    """Only what all of them share becomes one row."""
    base, rank = BASES["plain"]
    pairs = random_pairs(base, rank)
    for a, b in pairs[1].values():
        a[-1], b[-1] = a[0], b[0]
    adapter = load_adapter(write_all(tmp_path, formats.as_linear(pairs, base, rank)), base)
    assert_changes(adapter, pairs, base, 7 / rank)
    assert not adapter.shared_outer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_factors_keep_the_dtype_of_the_file(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No rounding on the way."""
    (writer, needs), (base, rank) = FORMATS[name], BASES["plain"]
    pairs = random_pairs(base, rank, one_a=ONE_A in needs, dtype=dtype)
    written = writer(pairs, base, rank)
    adapter = load_adapter(write_all(tmp_path, written), base, **written[2])
    assert all(p.a.dtype == p.b.dtype == dtype for layer in adapter.layers.values() for p in layer.values())
    assert_changes(adapter, pairs, base, 7 / rank)


@pytest.mark.parametrize(
    "prefix",
    [
        "model.layers.",
        "layers.",
        "base_model.model.model.language_model.layers.",
        "base_model.model.language_model.model.layers.",
        "base_model.model.thinker.model.layers.",
        "base_model.model.backbone.layers.",
        "base_model.model._orig_mod.model.layers.",
        "_fsdp_wrapped_module.base_model.model.model.layers.",
        "module.base_model.model.model.layers.",
    ],
)
def test_names_under_other_prefixes(prefix: str, tmp_path: Path) -> None:
    """The decoder's layers wherever a model keeps them, with or without the wrappers of training."""
    base, rank = BASES["plain"]
    for name in ("linear", "natural", "automodel"):
        writer, needs = FORMATS[name]
        pairs = random_pairs(base, rank, one_a=ONE_A in needs)
        config, files, options = writer(pairs, base, rank)
        renamed = {f: {n.replace(formats.PREFIX, prefix): t for n, t in tensors.items()} for f, tensors in files.items()}
        adapter = load_adapter(write_all(tmp_path, (config, renamed, options)), base, **options)
        assert_changes(adapter, pairs, base, 7 / rank)


@pytest.mark.parametrize(
    "prefix", ["mtp.layers.", "base_model.model.visual.layers.", "talker.model.layers.", "model.mtp.layers."]
)
def test_layers_of_another_stack_are_not_taken_for_the_decoders(prefix: str, tmp_path: Path) -> None:
    """Refused by name."""
    base, rank = BASES["plain"]
    config, files, _ = formats.as_linear(random_pairs(base, rank), base, rank)
    renamed = {f: {n.replace(formats.PREFIX, prefix): t for n, t in tensors.items()} for f, tensors in files.items()}
    with pytest.raises(AdapterError, match="in a known format, got an unknown name"):
        load_adapter(write_all(tmp_path, (config, renamed, {})), base)


@pytest.mark.parametrize("name", ["linear", "natural"])
def test_the_name_of_the_adapter_in_the_keys(name: str, tmp_path: Path) -> None:
    """A state dict saved without PEFT: lora_A.default.weight."""
    (writer, needs), (base, rank) = FORMATS[name], BASES["plain"]
    pairs = random_pairs(base, rank, one_a=ONE_A in needs)
    config, files, options = writer(pairs, base, rank)
    renamed = {f: {n.replace(".weight", ".default.weight"): t for n, t in tensors.items()} for f, tensors in files.items()}
    assert_changes(load_adapter(write_all(tmp_path, (config, renamed, options)), base), pairs, base, 7 / rank)


@pytest.mark.parametrize("name", ["automodel", "linear", "natural"])
def test_moe_rank_scaling_of_automodel(name: str, tmp_path: Path) -> None:
    """The experts' rank is r // top_k, and alpha is divided by that; the base must say top_k."""
    (writer, needs), (base, rank) = FORMATS[name], BASES["plain"]
    pairs = random_pairs(base, rank, one_a=ONE_A in needs)
    config, files, options = writer(pairs, base, rank)
    write_all(tmp_path, (config | {"r": 2 * rank + 1}, files, options))
    (tmp_path / "automodel_peft_config.json").write_text('{"moe_rank_scaling": true}')
    fields = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": base.num_experts,
        "hidden_size": base.hidden_size,
    }
    fields |= {"moe_intermediate_size": base.intermediate_size}
    assert_changes(load_adapter(tmp_path, fields | {"num_experts_per_tok": 2}), pairs, base, 7 / rank)
    with pytest.raises(AdapterError, match="config field num_experts_per_tok must be given .* moe_rank_scaling"):
        load_adapter(tmp_path, fields)
    with pytest.raises(AdapterError, match="must have shape|must have shapes"):
        load_adapter(tmp_path, fields | {"num_experts_per_tok": 3})
    with pytest.raises(AdapterError, match="field r must be >= 8, the experts of a token .moe_rank_scaling., got 7"):
        load_adapter(tmp_path, fields | {"num_experts_per_tok": 8})


def test_one_wrapper_without_target_parameters(tmp_path: Path) -> None:
    """An exporter that leaves the field out: the shape tells the parameter, or the field is asked for."""
    base, rank = BASES["plain"]
    pairs = random_pairs(base, rank, one_a=True)
    config, files, _ = formats.as_parameters(pairs, base, rank)
    del config["target_parameters"]
    tensors = files["adapter_model.safetensors"]
    both = load_adapter(write_all(tmp_path, (config, files, {})), base)
    assert_changes(both, pairs, base, 7 / rank)
    only_down = {n: t for n, t in tensors.items() if "base_layer" not in n}
    only_first = {n.replace(".base_layer", ""): t for n, t in tensors.items() if "base_layer" in n}
    for chosen, projections in ((only_down, ("down",)), (only_first, ("gate", "up"))):
        adapter = load_adapter(write_all(tmp_path, (config, {"adapter_model.safetensors": chosen}, {})), base)
        some = {layer: {p: pairs[layer][p] for p in projections} for layer in pairs}
        assert_changes(adapter, some, base, 7 / rank)
    plain = geometry("nemotron_h", 4, 20, 12)
    config, files, _ = formats.as_parameters(random_pairs(plain, 3), plain, 3)
    del config["target_parameters"]
    chosen = {n: t for n, t in files["adapter_model.safetensors"].items() if "base_layer" not in n}
    with pytest.raises(AdapterError, match="target_parameters must name the parameter of .*fits up_proj and down_proj"):
        load_adapter(write_all(tmp_path, (config, {"adapter_model.safetensors": chosen}, {})), plain)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_shared_factor_has_one_rank_and_one_scaling(field: str, tmp_path: Path) -> None:
    """A pattern for one expert's side alone leaves the shared side's meaning open: refused, naming both."""
    base, rank = BASES["plain"]
    config, files, _ = formats.as_mixed(random_pairs(base, rank, shared_outer=True), base, rank)
    write_all(tmp_path, (config | {field: {r"experts\.1\.gate_proj": 2}}, files, {}))
    with pytest.raises(
        AdapterError, match=r"experts\.gate_proj\.lora_A\.weight must have one rank and one scaling with .*\.1\.gate"
    ):
        load_adapter(tmp_path, base)


def test_a_shared_factor_needs_all_experts(tmp_path: Path) -> None:
    """An expert whose own side is missing beside the shared one: left out on purpose, or lost?"""
    base, rank = BASES["plain"]
    config, files, _ = formats.as_mixed(random_pairs(base, rank, shared_outer=True), base, rank)
    del files["adapter_model.safetensors"][f"{formats.PREFIX}1.mlp.experts.2.up_proj.lora_B.weight"]
    with pytest.raises(AdapterError, match="must have siblings for all 5 experts.* got none for expert 2"):
        load_adapter(write_all(tmp_path, (config, files, {})), base)


def test_forms_are_not_mixed_in_a_layer(tmp_path: Path) -> None:
    """gate_up beside gate; one tensor for all experts beside one for each; A and B under different names of a projection."""
    base, rank = BASES["plain"]
    pairs = random_pairs(base, rank, one_a=True)
    config, stacked, _ = formats.as_stacked(pairs, base, rank)
    fused = formats.as_stacked_gate_up(pairs, base, rank)[1]["adapter_model.safetensors"]
    linear = formats.as_linear(pairs, base, rank)[1]["adapter_model.safetensors"]
    both = {"adapter_model.safetensors": fused | stacked["adapter_model.safetensors"]}
    with pytest.raises(AdapterError, match="gate and up must be in one form in a layer, got .*gate_up_proj.* and .*gate_proj"):
        load_adapter(write_all(tmp_path, (config, both, {})), base)
    both = {"adapter_model.safetensors": linear | stacked["adapter_model.safetensors"]}
    with pytest.raises(AdapterError, match="experts must be in one tensor or in one each"):
        load_adapter(write_all(tmp_path, (config, both, {})), base)
    renamed = {n.replace("gate_proj.lora_B", "w1.lora_B"): t for n, t in linear.items()}
    with pytest.raises(
        AdapterError, match=r"0\.gate_proj must have lora_A and lora_B, got .*gate_proj.lora_A.* and .*w1.lora_B"
    ):
        load_adapter(write_all(tmp_path, (config, {"adapter_model.safetensors": renamed}, {})), base)


@pytest.mark.parametrize("name", ["stacked gate_up", "stacked gate_up, two A"])
def test_a_stacked_gate_up_of_an_interleaved_base_is_refused(name: str, tmp_path: Path) -> None:
    """Whether its rows alternate is shown nowhere: gate and up apart are clear."""
    (writer, needs), (base, rank) = FORMATS[name], BASES["gpt-oss"]
    written = writer(random_pairs(base, rank, one_a=ONE_A in needs), base, rank)
    with pytest.raises(AdapterError, match="gate_up_proj.* must have rows in a known order.*save them apart"):
        load_adapter(write_all(tmp_path, written), base)


@pytest.mark.parametrize("projection", ["gate_proj", "w1", "gate_up_proj"])
def test_a_base_without_gate_takes_none(projection: str, tmp_path: Path) -> None:
    """Nemotron-H's experts have up and down."""
    base, rank = BASES["not gated"]
    config, files, _ = formats.as_linear(random_pairs(base, rank), base, rank)
    files["adapter_model.safetensors"] = {
        n.replace("up_proj", projection): t for n, t in files["adapter_model.safetensors"].items() if "up_proj" in n
    }
    with pytest.raises(AdapterError, match="projection must be up or down .the base's have no gate., got gate"):
        load_adapter(write_all(tmp_path, (config, files, {})), base)


def test_mlx_names_of_a_plain_mlp(tmp_path: Path) -> None:
    """fc1 is up and fc2 is down where there is no gate; a gated base has no such names."""
    base, rank = BASES["not gated"]
    pairs = random_pairs(base, rank)
    config, files, _ = formats.as_mlx(pairs, base, rank)
    names = {"up_proj": "fc1", "down_proj": "fc2"}
    renamed = {".".join(names.get(p, p) for p in n.split(".")): t for n, t in files["adapters.safetensors"].items()}
    write_all(tmp_path, (config, {"adapters.safetensors": renamed}, {}))
    assert_changes(load_adapter(tmp_path, base), pairs, base, 7 / rank)
    with pytest.raises(
        AdapterError, match="projection must be gate_proj, up_proj or down_proj of a gated base, got fc1 or fc2"
    ):
        load_adapter(tmp_path, geometry("qwen3_moe", 4, 20, 12))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 3, "lora_alpha": 7}, "adapter_config must have mlx-lm's lora_parameters.scale"),
        ({"lora_parameters": {"rank": 3}}, "field lora_parameters.scale must be a finite number, got None"),
        ({"lora_parameters": {"rank": 3, "scale": 2.0, "alpha": 16}}, "field lora_parameters.alpha must be absent, got 16"),
        ({"fine_tune_type": "full", "lora_parameters": {"rank": 3, "scale": 2.0}}, "fine_tune_type must be lora, got 'full'"),
        (
            {"fine_tune_type": "lora", "use_dora": True, "lora_parameters": {"rank": 3, "scale": 2.0}},
            "must be lora, got 'dora'",
        ),
        ({"lora_parameters": 3}, "field lora_parameters must be an object"),
    ],
)
def test_configs_of_mlx_that_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Another tool's config beside mlx-lm's tensors, a factor that is not given or not clear, other kinds of training."""
    base, rank = BASES["plain"]
    _, files, _ = formats.as_mlx(random_pairs(base, rank), base, rank)
    with pytest.raises(AdapterError, match=message):
        load_adapter(write_all(tmp_path, (config, files, {})), base)


@pytest.mark.parametrize("model_type", ["", "qwen3_vl_moe"])
def test_an_unknown_storage_is_not_guessed(model_type: str, tmp_path: Path) -> None:
    """peft_version decides nothing where the storage is not known, or was changed between two transformers."""
    base = geometry(model_type, 4, 16, 16)
    config, files, _ = formats.as_parameters(random_pairs(base, 3, one_a=True), base, 3)
    down = {n: t for n, t in files["adapter_model.safetensors"].items() if "base_layer" not in n}
    write_all(tmp_path, (config | {"target_parameters": ["experts.down_proj"]}, {"adapter_model.safetensors": down}, {}))
    with pytest.raises(AdapterError, match="must show its orientation.* peft_version, got '0.21.2', does not decide"):
        load_adapter(tmp_path, base)
    assert load_adapter(tmp_path, base, orientation="natural").rank == 3


@pytest.mark.parametrize("flag", ["false", 0, []], ids=str)
def test_a_flag_is_true_or_false(flag: Any, tmp_path: Path) -> None:
    """The text "false" would count as true."""
    base, rank = BASES["plain"]
    config, files, _ = formats.as_linear(random_pairs(base, rank), base, rank)
    with pytest.raises(AdapterError, match="field use_rslora must be true or false, got"):
        load_adapter(write_all(tmp_path, (config | {"use_rslora": flag}, files, {})), base)
