"""Small adapter files in the two PEFT forms, to be written, edited one thing at a time, and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..adapters import load_adapter

BASE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "hidden_size": 12,
    "moe_intermediate_size": 10,
    "intermediate_size": 50,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
PREFIX = "base_model.model.model.layers."
Files = tuple[dict[str, Any], dict[str, Tensor]]


def per_expert() -> Files:
    """Layers 1 and 2, all experts and projections, rank 4, alpha 8."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (1, 2):
        for expert in range(4):
            for projection, (size_in, size_out) in {"gate": (12, 10), "up": (12, 10), "down": (10, 12)}.items():
                stem = f"{PREFIX}{layer}.mlp.experts.{expert}.{projection}_proj"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(4, size_in, generator=generator)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(size_out, 4, generator=generator)
    return dict(CONFIG), tensors


def fused() -> Files:
    """Layers 1 and 2, both parameters, rank 4, alpha 8, natural orientation."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (1, 2):
        for wrapper, size_in, size_out in ((".base_layer", 12, 20), ("", 10, 12)):
            stem = f"{PREFIX}{layer}.mlp.experts{wrapper}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(16, size_in, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size_out, 16, generator=generator)
    return CONFIG | {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, tensors


def write(folder: Path, config: Any, tensors: dict[str, Tensor]) -> Path:
    """Put an adapter on disk as PEFT does; a string is a config verbatim."""
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load_files(folder: Path, files: Files, base: dict[str, Any] = BASE, **options: Any) -> Any:
    """Write the files and load them back."""
    return load_adapter(write(folder, *files), base, **options)


def expert_delta(tensors: dict[str, Tensor], layer: int, expert: int, projection: str, scaling: float) -> Tensor:
    """scaling * B A of one expert of a per-expert file, fp64."""
    stem = f"{PREFIX}{layer}.mlp.experts.{expert}.{projection}_proj"
    return scaling * (tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double())
