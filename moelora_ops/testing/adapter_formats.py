"""One adapter in every format that the loader reads: random factors, and writers that put them on disk as each tool does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..adapters import MoeGeometry

PREFIX = "base_model.model.model.layers."
Pairs = dict[int, dict[str, tuple[Tensor, Tensor]]]  # layer -> gate, up, down -> A [E or 1, r, in], B [E or 1, out, r]
Written = tuple[dict[str, Any], dict[str, dict[str, Tensor]], dict[str, Any]]  # config, files, options of load_adapter


def random_pairs(
    geometry: MoeGeometry,
    rank: int,
    *,
    seed: int = 0,
    one_a: bool = False,
    shared_outer: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Pairs:
    """Signed factors for every MoE layer; `one_a`: gate and up have the same A."""
    generator = torch.Generator().manual_seed(seed)
    experts = geometry.num_experts

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pairs: Pairs = {}
    for layer in geometry.moe_layers:
        pairs[layer] = {}
        for projection in ("gate", "up", "down") if geometry.gated else ("up", "down"):
            size_in, size_out = geometry.sizes(projection)
            a_experts, b_experts = (experts, 1) if projection == "down" else (1, experts)
            a = randn(a_experts if shared_outer else experts, rank, size_in)
            b = randn(b_experts if shared_outer else experts, size_out, rank)
            pairs[layer][projection] = (pairs[layer]["gate"][0] if one_a and projection == "up" and geometry.gated else a, b)
    return pairs


def dense(pairs: Pairs, geometry: MoeGeometry, layer: int, projection: str, scaling: float) -> Tensor:
    """scaling * B A of all experts, fp64."""
    a, b = pairs[layer][projection]
    return (scaling * (b.double() @ a.double())).expand(geometry.num_experts, -1, -1)


def _config(rank: int, **fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 7, **fields}


def _gate_up(layer: dict[str, tuple[Tensor, Tensor]], geometry: MoeGeometry) -> tuple[Tensor, Tensor]:
    """One A, and the rows of B in the order of the base's parameter."""
    if not geometry.gated:
        return layer["up"]
    (a, gate), (_, up) = layer["gate"], layer["up"]
    return a, torch.stack([gate, up], 2).flatten(1, 2) if geometry.interleaved else torch.cat([gate, up], 1)


def as_linear(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """PEFT on one nn.Linear for each expert."""
    tensors = {
        f"{PREFIX}{layer}.mlp.experts.{e}.{projection}_proj.lora_{half}.weight": matrix
        for layer, projections in pairs.items()
        for projection, (a, b) in projections.items()
        for e in range(geometry.num_experts)
        for half, matrix in (("A", a[e if len(a) > 1 else 0]), ("B", b[e if len(b) > 1 else 0]))
    }
    return _config(rank, peft_version="0.18.1"), {"adapter_model.safetensors": tensors}, {}


def as_w123(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """The same under Mixtral's names."""
    config, files, options = as_linear(pairs, geometry, rank)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"}
    renamed = {
        ".".join(names.get(part, part) for part in name.split(".")): t for name, t in files["adapter_model.safetensors"].items()
    }
    return config, {"adapter_model.safetensors": renamed}, options


def as_fused_linear(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """Unsloth's names for gpt-oss in 4 bits: gate and up in one nn.Linear for each expert."""
    tensors = {}
    for layer, projections in pairs.items():
        for name, (a, b) in {"gate_up_projs": _gate_up(projections, geometry), "down_projs": projections["down"]}.items():
            for e in range(geometry.num_experts):
                tensors[f"{PREFIX}{layer}.mlp.experts.{name}.{e}.lora_A.weight"] = a[e]
                tensors[f"{PREFIX}{layer}.mlp.experts.{name}.{e}.lora_B.weight"] = b[e]
    return _config(rank), {"adapter_model.safetensors": tensors}, {}


def as_stacked(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """All experts, or one for all of them, in a 3-D tensor (SGLang, Megatron-Bridge)."""
    tensors = {
        f"{PREFIX}{layer}.mlp.experts.{projection}_proj.lora_{half}.weight": factor
        for layer, projections in pairs.items()
        for projection, pair in projections.items()
        for half, factor in zip("AB", pair)
    }
    return _config(rank), {"adapter_model.safetensors": tensors}, {}


def as_stacked_gate_up(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """The same with gate and up in one: A of both, one above the other, or the one that they share."""
    config, files, options = as_stacked(pairs, geometry, rank)
    tensors = files["adapter_model.safetensors"]
    for layer, projections in pairs.items():
        stem = f"{PREFIX}{layer}.mlp.experts"
        for name in ("gate", "up"):
            del tensors[f"{stem}.{name}_proj.lora_A.weight"], tensors[f"{stem}.{name}_proj.lora_B.weight"]
        a = (projections["gate"][0], projections["up"][0])
        tensors[f"{stem}.gate_up_proj.lora_A.weight"] = a[0] if torch.equal(*a) else torch.cat(a, 1)
        tensors[f"{stem}.gate_up_proj.lora_B.weight"] = _gate_up(projections, geometry)[1]
    return config, files, options


def as_mixed(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """Megatron-Bridge's stream: the shared side 3-D, the other one 2-D for each expert."""
    _, stacked, _ = as_stacked(pairs, geometry, rank)
    _, single, _ = as_linear(pairs, geometry, rank)
    tensors = {name: t for name, t in stacked["adapter_model.safetensors"].items() if len(t) == 1}
    shared = {(name.split(".experts.")[0], name.split(".")[-3], name.split(".")[-2]) for name in tensors}
    for name, tensor in single["adapter_model.safetensors"].items():
        if (name.split(".experts.")[0], name.split(".")[-3], name.split(".")[-2]) not in shared:
            tensors[name] = tensor
    return _config(rank), {"adapter_model.safetensors": tensors}, {}


def as_parameters(
    pairs: Pairs, geometry: MoeGeometry, rank: int, *, natural: bool = True, expert_major: bool = False
) -> Written:
    """PEFT's target_parameters: rows e * r + j of lora_A, columns j * E + e of lora_B."""
    tensors = {}
    for layer, projections in pairs.items():
        for wrapper, (a, b) in ((".base_layer", _gate_up(projections, geometry)), ("", projections["down"])):
            if not natural:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            stem = f"{PREFIX}{layer}.mlp.experts{wrapper}"
            tensors[f"{stem}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{stem}.lora_B.weight"] = (b.permute(1, 0, 2) if expert_major else b.permute(1, 2, 0)).flatten(1)
    first = "gate_up_proj" if geometry.gated else "up_proj"
    config = _config(rank, target_parameters=[f"experts.{first}", "experts.down_proj"])
    config["peft_version"] = {True: "0.18.1" if "llama4" in geometry.model_type else "0.21.2", False: "0.19.0"}[natural]
    return config, {"adapter_model.safetensors": tensors}, {"b_packing": "expert_major"} if expert_major else {}


def as_automodel(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """NeMo Automodel's own tensors, for x A B."""
    tensors = {
        f"{PREFIX}{layer}.mlp.experts.lora_{name}_{half}": factor.transpose(1, 2)
        for layer, projections in pairs.items()
        for name, pair in (("gate_and_up", _gate_up(projections, geometry)), ("down", projections["down"]))
        for half, factor in zip("AB", pair)
    }
    return _config(rank), {"adapter_model.safetensors": tensors}, {}


def as_ktransformers(pairs: Pairs, geometry: MoeGeometry, rank: int) -> Written:
    """KTransformers' file beside PEFT's, which has the attention."""
    tensors = {
        f"layers.{layer}.experts.{projection}_lora_{half}": factor
        for layer, projections in pairs.items()
        for projection, pair in projections.items()
        for half, factor in zip("ab", pair)
    }
    attention = {f"{PREFIX}0.self_attn.q_proj.lora_A.weight": torch.ones(rank, geometry.hidden_size)}
    return _config(rank), {"adapter_model.safetensors": attention, "fused_expert_lora.safetensors": tensors}, {}


def as_mlx(pairs: Pairs, geometry: MoeGeometry, rank: int, *, flat: bool = False) -> Written:
    """mlx-lm's: the scale is the factor. `flat`: lora_a (E * r, in), as it once was."""
    tensors = {
        f"model.layers.{layer}.mlp.switch_mlp.{projection}_proj.lora_{half}": factor.flatten(0, 1)
        if flat and half == "a"
        else factor
        for layer, projections in pairs.items()
        for projection, pair in projections.items()
        for half, factor in zip("ab", pair)
    }
    parameters = {"rank": rank, "scale": 7 / rank, "dropout": 0.0}
    return {"fine_tune_type": "lora", "lora_parameters": parameters}, {"adapters.safetensors": tensors}, {}


def write_all(folder: Path, written: Written) -> Path:
    """Put the files of a format on disk."""
    config, files, _ = written
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file({key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}, folder / name)
    return folder
