"""One fault in a good adapter, in every format: it is refused, or harmless and the values stay right; never loaded wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelora_ops import AdapterError, load_adapter
from moelora_ops.adapters import MoeGeometry
from moelora_ops.testing import adapter_formats as formats
from moelora_ops.testing.adapter_formats import Written, dense, random_pairs, write_all

BASE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 5, "hidden_size": 24, "moe_intermediate_size": 14}
GEOMETRY, RANK = MoeGeometry.from_config(BASE), 3
WRITERS = {
    "linear": formats.as_linear,
    "stacked": formats.as_stacked,
    "parameters": formats.as_parameters,
    "automodel": formats.as_automodel,
    "ktransformers": formats.as_ktransformers,
    "mlx": formats.as_mlx,
}
Edit = Callable[[Written], Any]


def tensors(edit: Callable[[dict[str, Tensor], str], Any]) -> Edit:
    """An edit of the file with the experts, given the name of one of them."""

    def apply(written: Written) -> None:
        file = next(tensors for tensors in written[1].values() if any("exp" in n or "switch_mlp" in n for n in tensors))
        names = sorted(n for n in file if "exp" in n or "switch_mlp" in n)
        edit(file, names[len(names) // 2])

    return apply


def one(change: Callable[[Tensor], Tensor]) -> Edit:
    return tensors(lambda file, name: file.update({name: change(file[name]).contiguous()}))


def fields(**changes: Any) -> Edit:
    """An edit of the config; of mlx-lm's rank for r."""

    def apply(written: Written) -> None:
        config = written[0]
        if "lora_parameters" in config:
            names = {"r": "rank", "lora_alpha": "scale"}
            config["lora_parameters"].update({names[k]: v for k, v in changes.items() if k in names})
            if not changes.keys() & names.keys():
                config.update({"fine_tune_type": "dora"})
        else:
            config.update(changes)

    return apply


def poison(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[(-1,) * tensor.dim()] = value
        return tensor

    return change


def renamed(old: str, new: str) -> Edit:
    """An edit of every name."""

    def edit(file: dict[str, Tensor], name: str) -> None:
        moved = {n.replace(old, new, 1): t for n, t in file.items()}
        file.clear()
        file.update(moved)

    return tensors(edit)


FAULTS: dict[str, Edit] = {
    "a tensor is missing": tensors(lambda file, name: file.pop(name)),
    "a tensor has an unknown name": tensors(lambda file, name: file.update({name.replace("lora_", "lara_"): file.pop(name)})),
    "an unknown tensor beside it": tensors(lambda file, name: file.update({f"{name}_more": torch.ones(2)})),
    "the same tensor under another name": tensors(
        lambda file, name: (
            file.update({name.removeprefix("base_model.model.").replace("model.layers", "layers"): file[name].clone()})
            if "model.layers" in name
            else file.update({f"model.{name}": file[name].clone()})
        )
    ),
    "a tensor is transposed": one(lambda t: t.transpose(-1, -2)),
    "a tensor has a dimension more": one(lambda t: t[None]),
    "a tensor is flat": one(lambda t: t.flatten()),
    "a tensor is empty": one(lambda t: t[:0]),
    "a tensor lost a row": one(lambda t: t[:-1]),
    "a tensor lost a column": one(lambda t: t[..., :-1]),
    "a tensor has a column more": one(lambda t: torch.cat([t, t[..., :1]], -1)),
    "NaN": one(poison(float("nan"))),
    "inf": one(poison(float("inf"))),
    "-inf": one(poison(float("-inf"))),
    "whole numbers": one(lambda t: t.to(torch.int32)),
    "fp8 without scales": one(lambda t: t.to(torch.float8_e4m3fn)),
    "complex": one(lambda t: t.to(torch.complex64)),
    "a layer that the base has not": renamed("layers.1.", "layers.2."),
    "layers of another stack": renamed("layers.", "blocks.0.layers."),
    "r is larger": fields(r=RANK + 1),
    "r is smaller": fields(r=RANK - 1),
    "r is missing": fields(r=None),
    "r is text": fields(r=str(RANK)),
    "r is a fraction": fields(r=3.5),
    "alpha is missing": fields(lora_alpha=None),
    "alpha is text": fields(lora_alpha="7"),
    "alpha is NaN": fields(lora_alpha=float("nan")),
    "DoRA": fields(use_dora=True),
    "a magnitude": tensors(lambda file, name: file.update({name.rsplit(".", 1)[0] + ".lora_magnitude_vector": torch.ones(5)})),
    "a bias": tensors(lambda file, name: file.update({name.rsplit(".", 1)[0] + ".bias": torch.ones(5)})),
    "full weights": tensors(lambda file, name: file.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(5, 28, 24)})),
}


def build(name: str) -> tuple[Any, Written]:
    pairs = random_pairs(GEOMETRY, RANK, one_a=name in ("parameters", "automodel"))
    return pairs, WRITERS[name](pairs, GEOMETRY, RANK)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_fault_is_refused(name: str, fault: str, tmp_path: Path) -> None:
    """Whatever the format: no fault is loaded, and the message is a sentence that names a tensor or a field."""
    _, written = build(name)
    load_adapter(write_all(tmp_path, written), BASE)
    FAULTS[fault](written)
    with pytest.raises(AdapterError, match="(must|expected).* got"):
        load_adapter(write_all(tmp_path, written), BASE)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 20}, {"moe_intermediate_size": 12}, {"num_experts": 4}, {"num_experts": 6}, {"num_experts": 3}]
    + [
        {"num_experts": 15},
        {"num_hidden_layers": 1},
        {"mlp_only_layers": [1]},
        {"model_type": "nemotron_h", "layers_block_type": ["E", "E"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WRITERS)
def test_another_base_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Sizes, experts, layers, gate. (A base with more experts than a per-expert file has is one that it fits.)"""
    pairs, written = build(name)
    write_all(tmp_path, written)
    if name == "linear" and change.get("num_experts", 0) > 5:
        adapter = load_adapter(tmp_path, BASE | change)
        got = adapter.delta_weight(1, "down")
        assert got is not None and not got[5:].any()
        torch.testing.assert_close(got[:5].double(), dense(pairs, GEOMETRY, 1, "down", 7 / RANK), rtol=1e-5, atol=1e-5)
        return
    with pytest.raises(AdapterError, match="must .*got"):
        load_adapter(tmp_path, BASE | change)


@pytest.mark.parametrize("name", WRITERS)
def test_every_byte_of_the_header_counts(name: str, tmp_path: Path) -> None:
    """Any byte of the header changed: refused, or the values are right (a metadata byte, a space)."""
    pairs, written = build(name)
    write_all(tmp_path, written)
    file = max(tmp_path.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    good = file.read_bytes()
    length = 8 + struct.unpack("<Q", good[:8])[0]
    for place in range(0, length, max(1, length // 60)):
        for flip in (0x01, 0x20):
            file.write_bytes(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :])
            try:
                adapter = load_adapter(tmp_path, BASE)
            except AdapterError:
                continue
            for layer in adapter.layers:
                for projection in adapter.layers[layer]:
                    want = dense(pairs, GEOMETRY, layer, projection, 7 / RANK)
                    assert torch.allclose(adapter.delta_weight(layer, projection).double(), want, rtol=1e-5, atol=1e-5), (
                        place,
                        flip,
                    )
