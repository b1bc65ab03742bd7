"""The demo's adapters: random factors, written the two ways PEFT writes adapters of MoE experts.

The factors are kept, so that the demo can compare what was loaded from disk with what was meant.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor

from .tiny_model import CONFIG

PREFIX = "base_model.model.model.layers"


@dataclass(frozen=True)
class Factors:
    """One adapter, fp32, per layer: A [E, r, in] and B [E, out, r]; the change of a weight is alpha / r * B A."""

    rank: int
    alpha: int
    gate_a: list[Tensor]
    up_a: list[Tensor]
    gate_b: list[Tensor]
    up_b: list[Tensor]
    down_a: list[Tensor]
    down_b: list[Tensor]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def random_factors(rank: int, seed: int, *, shared_a: bool) -> Factors:
    """Factors whose every value is exact in bf16; `shared_a`: gate and up have one A, as in a fused gate_up adapter."""
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate, experts = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["num_experts"]

    def per_layer(rows: int, columns: int, gain: float) -> list[Tensor]:
        return [
            (torch.randn(experts, rows, columns, generator=generator) * gain).bfloat16().float()
            for _ in range(CONFIG["num_hidden_layers"])
        ]

    gate_a = per_layer(rank, hidden, hidden**-0.5)
    up_a = gate_a if shared_a else per_layer(rank, hidden, hidden**-0.5)
    out = 0.25 * rank**-0.5
    return Factors(
        rank=rank,
        alpha=2 * rank,
        gate_a=gate_a,
        up_a=up_a,
        gate_b=per_layer(intermediate, rank, out),
        up_b=per_layer(intermediate, rank, out),
        down_a=per_layer(rank, intermediate, intermediate**-0.5),
        down_b=per_layer(hidden, rank, 3 * out),
    )


def write_per_expert(folder: Path, factors: Factors) -> None:
    """As PEFT writes adapters on one nn.Linear per expert and projection."""
    tensors = {}
    for layer in range(len(factors.gate_a)):
        for name, a, b in (
            ("gate_proj", factors.gate_a[layer], factors.gate_b[layer]),
            ("up_proj", factors.up_a[layer], factors.up_b[layer]),
            ("down_proj", factors.down_a[layer], factors.down_b[layer]),
        ):
            for expert in range(a.shape[0]):
                module = f"{PREFIX}.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = a[expert].contiguous()
                tensors[f"{module}.lora_B.weight"] = b[expert].contiguous()
    _write(folder, factors, tensors, target_modules=["gate_proj", "up_proj", "down_proj"], target_parameters=None)


def write_fused(folder: Path, factors: Factors) -> None:
    """As PEFT >= 0.19.1 writes adapters on the 3-D parameters gate_up_proj and down_proj (target_parameters)."""
    tensors = {}
    for layer in range(len(factors.gate_a)):
        gate_up_b = torch.cat([factors.gate_b[layer], factors.up_b[layer]], dim=1)
        for module, a, b in (
            ("mlp.experts.base_layer", factors.gate_a[layer], gate_up_b),
            ("mlp.experts", factors.down_a[layer], factors.down_b[layer]),
        ):
            tensors[f"{PREFIX}.{layer}.{module}.lora_A.weight"] = a.flatten(0, 1).contiguous()  # row e * r + j
            tensors[f"{PREFIX}.{layer}.{module}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()  # column j * E + e
    _write(folder, factors, tensors, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


def _write(folder: Path, factors: Factors, tensors: dict[str, Tensor], **targets: Any) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21.2",
        "base_model_name_or_path": "moelora-demo",
        "r": factors.rank,
        "lora_alpha": factors.alpha,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "lora_bias": False,
        "bias": "none",
        "fan_in_fan_out": False,
        **targets,
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "adapter_model.safetensors")


def stack(slots: Sequence[Factors], layer: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One layer's adapters as the LoRA arguments of `fused_experts_lora`, built without the loader and the pool."""
    if not slots:
        return dict.fromkeys(("lora_a13", "lora_b13", "lora_a2", "lora_b2"))
    rank = max(f.rank for f in slots)

    def rows(a: Tensor) -> Tensor:  # A, padded to the largest rank
        return torch.cat([a, a.new_zeros(a.shape[0], rank - a.shape[1], a.shape[2])], dim=1)

    def columns(b: Tensor) -> Tensor:  # B, likewise
        return torch.cat([b, b.new_zeros(*b.shape[:2], rank - b.shape[2])], dim=2)

    stacked = {
        "lora_a13": [torch.cat([rows(f.gate_a[layer]), rows(f.up_a[layer])], dim=1) for f in slots],
        "lora_b13": [columns(torch.cat([f.gate_b[layer], f.up_b[layer]], dim=1)) * f.scaling for f in slots],
        "lora_a2": [rows(f.down_a[layer]) for f in slots],
        "lora_b2": [columns(f.down_b[layer]) * f.scaling for f in slots],
    }
    ranks = torch.tensor([f.rank for f in slots], dtype=torch.int32, device=device)
    return {"lora_ranks": ranks, **{name: torch.stack(t).to(dtype).to(device) for name, t in stacked.items()}}
