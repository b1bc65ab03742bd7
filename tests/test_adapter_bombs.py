"""Files that are broken, or made to cost time and memory: refused at once, by name."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moelora_ops import AdapterError, load_adapter
from moelora_ops.adapters import MoeGeometry, files
from moelora_ops.testing import adapter_formats as formats
from moelora_ops.testing.adapter_formats import Pairs, Written, dense, random_pairs, write_all

BASE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 5, "hidden_size": 24, "moe_intermediate_size": 14}
GEOMETRY, RANK = MoeGeometry.from_config(BASE), 3


def build(name: str) -> tuple[Pairs, Written]:
    pairs = random_pairs(GEOMETRY, RANK)
    writer = {"linear": formats.as_linear, "mlx": formats.as_mlx, "ktransformers": formats.as_ktransformers}[name]
    return pairs, writer(pairs, GEOMETRY, RANK)


def header(entries: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(entries.encode())) + entries.encode() + data


ENTRY = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a length of 2^64": b"\xff" * 8 + b"{}",
    "a length past the file": struct.pack("<Q", 100) + b"{}",
    "no JSON": header("hello"),
    "a list": header("[1]"),
    "no text": struct.pack("<Q", 2) + b"\xff\xfe",
    "deep nesting": header("[" * 200_000),
    "deep objects": header('{"a":' * 200_000),
    "a number of a million digits": header('{"x":' + "1" * 1_000_000 + "}"),
    "the same name twice": header("{" + ENTRY + "," + ENTRY + "}", b"\0" * 4),
    "a field twice": header('{"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
    "a negative offset": header('{"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', b"\0" * 4),
    "offsets that end before they start": header('{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', b"\0" * 4),
    "a negative size": header('{"x":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}', b"\0" * 4),
    "a size that is true": header('{"x":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b"\0" * 4),
    "a size of 10^18": header('{"x":{"dtype":"F32","shape":[1000000000000000000],"data_offsets":[0,4]}}', b"\0" * 4),
    "sizes whose product wraps": header(
        '{"x":{"dtype":"F32","shape":[4294967296,4294967297],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "a shape that is a number": header('{"x":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}', b"\0" * 4),
    "three offsets": header('{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}', b"\0" * 4),
    "a name of a million letters": header("{" + ENTRY.replace("x", "x" * 1_000_000) + "}", b"\0" * 4),
    "bytes left over": header("{" + ENTRY + "}", b"\0" * 8),
    "bytes missing": header("{" + ENTRY + "}", b"\0" * 3),
    "a hole": header("{" + ENTRY.replace("[0,4]", "[4,8]") + "}", b"\0" * 8),
    "no tensors": header("{}"),
    "a pickle": b"\x80\x04\x95" + b"\0" * 40,
    "a zip": b"PK\x03\x04" + b"\0" * 40,
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_broken_file_is_refused_at_once(fault: str, tmp_path: Path) -> None:
    """No crash, no gigabytes, no waiting."""
    (tmp_path / "adapter_model.safetensors").write_bytes(HEADERS[fault])
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 7}))
    began = time.monotonic()
    with pytest.raises(
        AdapterError, match="adapter_model.safetensors must be a whole safetensors file|must hold tensors"
    ) as error:
        load_adapter(tmp_path, BASE)
    assert len(str(error.value)) < 1000
    assert time.monotonic() - began < 5


def test_a_header_of_100_mb_is_not_read(tmp_path: Path) -> None:
    """It would become GBs of Python objects."""
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(100_000_008)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 7}))
    with pytest.raises(AdapterError, match="got: a header of 100000000 bytes, where 67108864 are the most possible"):
        load_adapter(tmp_path, BASE)


CONFIGS: dict[str, str] = {
    "empty": "",
    "no JSON": "{'r': 3}",
    "deep nesting": "[" * 200_000,
    "not text": "\udcff",
    "a number of a million digits": '{"r": ' + "9" * 1_000_000 + "}",
    "r twice": '{"r": 3, "r": 4, "lora_alpha": 7}',
    "null": "null",
    "text": '"r"',
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_broken_config_is_refused_at_once(fault: str, tmp_path: Path) -> None:
    """The config is named."""
    write_all(tmp_path, build("linear")[1])
    (tmp_path / "adapter_config.json").write_text(CONFIGS[fault], errors="surrogateescape")
    began = time.monotonic()
    with pytest.raises(AdapterError, match="^adapter config adapter_config.json must"):
        load_adapter(tmp_path, BASE)
    assert time.monotonic() - began < 5


def test_a_config_of_20_mb_is_not_parsed(tmp_path: Path) -> None:
    """The limit is named."""
    write_all(tmp_path, build("linear")[1])
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 7, "x": "' + "x" * 20_000_000 + '"}')
    with pytest.raises(AdapterError, match="must have at most 16777216 bytes, got more"):
        load_adapter(tmp_path, BASE)


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+$",
        "(.*)*x",
        "(.*a){30}",
        "(a|a)*b",
        r"(?:\w+\.?)+!",
        ".*.*.*.*.*.*x",
        "(a?){40}a{40}",
        "a?" * 40 + "!",
        "(x|y|z|w)" * 20,
    ]
    + ["(?=.*.*.*.*.*.*x)", "x" * 5000, "((((((((((.*)*)*)*)*)*)*)*)*)*)*", r"(\w*)*\1", "(" * 300 + ")" * 300],
    ids=lambda key: key[:30],
)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_cannot_hang_the_loader(field: str, key: str, tmp_path: Path) -> None:
    """Keys that could take forever are refused by name, or done at once."""
    config, files, options = build("linear")[1]
    write_all(tmp_path, (config | {field: {key: 3}}, files, options))
    began = time.monotonic()
    try:
        load_adapter(tmp_path, BASE)
    except AdapterError as error:
        assert f"adapter_config field {field}" in str(error) and len(str(error)) < 400
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("key", "why"),
    [("(a+)+$", "could take forever"), ("[a]" * 400, "1200 characters, more than 1000"), ("a" * 400 + "(", "missing")],
)
def test_why_a_pattern_is_refused(key: str, why: str, tmp_path: Path) -> None:
    """Repetitions in repetitions, length, syntax; the message does not repeat a long key."""
    config, files, options = build("linear")[1]
    write_all(tmp_path, (config | {"rank_pattern": {key: 3}}, files, options))
    with pytest.raises(AdapterError, match=f"field rank_pattern must have regular expressions as keys, got .*{why}") as error:
        load_adapter(tmp_path, BASE)
    assert len(str(error.value)) < 300


def test_a_pattern_for_each_module_is_quick(tmp_path: Path) -> None:
    """EVA writes one for each: 20,000 keys take no longer than 20,000 look-ups."""
    config, files, options = build("linear")[1]
    many = {f"model.layers.{layer}.mlp.experts.{e}.down_proj": 3 for layer in range(100) for e in range(200)}
    write_all(tmp_path, (config | {"rank_pattern": many, "alpha_pattern": {key: 7 for key in many}}, files, options))
    began = time.monotonic()
    load_adapter(tmp_path, BASE)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"num_experts": 10**12},
        {"hidden_size": 10**30},
        {"moe_intermediate_size": 2**40},
        {"num_experts": 2**20},
    ]
    + [
        {"mlp_only_layers": {"a": 1}},
        {"num_experts": True},
        {"num_experts": [5, 4]},
        {"model_type": "llama4", "interleave_moe_layer_step": 0},
    ],
    ids=str,
)
def test_an_absurd_base_is_refused_at_once(change: dict[str, Any], tmp_path: Path) -> None:
    """Before anything is allocated for it."""
    write_all(tmp_path, build("linear")[1])
    began = time.monotonic()
    with pytest.raises(AdapterError, match="^config field"):
        load_adapter(tmp_path, BASE | change)
    assert time.monotonic() - began < 5


def test_links_and_folders_in_place_of_files(tmp_path: Path) -> None:
    """A link to a good file is followed, as in the cache of a hub; a broken one, a folder, a device is refused."""
    good = tmp_path / "good"
    good.mkdir()
    write_all(good, build("linear")[1])
    for name, target in (
        ("linked", good / "adapter_model.safetensors"),
        ("broken", tmp_path / "nowhere"),
        ("device", Path("/dev/zero")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").symlink_to(good / "adapter_config.json")
        (folder / "adapter_model.safetensors").symlink_to(target)
    assert load_adapter(tmp_path / "linked", BASE).rank == RANK
    folder = tmp_path / "folder"
    (folder / "adapter_model.safetensors").mkdir(parents=True)
    for name in ("broken", "device", "folder"):
        with pytest.raises(AdapterError, match="path must hold adapter_model.safetensors"):
            load_adapter(tmp_path / name, BASE)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adapter_model.bin", r"is a pickle and is not opened; convert it with safetensors.torch.save_file\(torch.load"),
        ("adapter_model.pt", "is a pickle"),
        ("adapters.npz", "is no safetensors file"),
        ("adapter.gguf", "is no safetensors file"),
    ],
)
def test_other_weight_files_are_named(name: str, hint: str, tmp_path: Path) -> None:
    """What is there instead, and what to do with it."""
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(AdapterError, match=f"path must hold adapter_model.safetensors, .*got {name} in .*{hint}"):
        load_adapter(tmp_path, BASE)


def split(folder: Path, tensors: dict[str, torch.Tensor], names: list[str]) -> None:
    for i, name in enumerate(names):
        save_file(dict(sorted(tensors.items())[i :: len(names)]), folder / name)


def test_shards(tmp_path: Path) -> None:
    """All of them are one adapter, from whichever path; one that is missing, or of another set, is told."""
    pairs, (config, written, _) = build("linear")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    names = [f"adapter_model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    split(tmp_path, written["adapter_model.safetensors"], names)
    for path in (tmp_path, tmp_path / names[1]):
        adapter = load_adapter(path, BASE)
        for layer, projection in ((0, "gate"), (1, "down")):
            want = dense(pairs, GEOMETRY, layer, projection, 7 / RANK)
            torch.testing.assert_close(adapter.delta_weight(layer, projection).double(), want, rtol=1e-5, atol=1e-5)
    (tmp_path / names[1]).rename(tmp_path / "adapter_model-00002-of-00004.safetensors")
    with pytest.raises(AdapterError, match="path must hold all 3 shards of one adapter, got adapter_model-00001-of-00003"):
        load_adapter(tmp_path, BASE)
    (tmp_path / "adapter_model-00002-of-00004.safetensors").unlink()
    with pytest.raises(AdapterError, match="path must hold all 3 shards of one adapter"):
        load_adapter(tmp_path / names[0], BASE)


def test_an_adapter_in_a_folder_of_its_name(tmp_path: Path) -> None:
    """PEFT saves adapters that are not called "default" one folder deeper: the message says which."""
    (tmp_path / "math").mkdir()
    write_all(tmp_path / "math", build("linear")[1])
    with pytest.raises(AdapterError, match="path must hold .* got no such file in .*; meant may be math inside it"):
        load_adapter(tmp_path, BASE)


@pytest.mark.parametrize("how", ["spaces", "escapes", "another order", "metadata last"])
def test_headers_of_other_writers(how: str, tmp_path: Path) -> None:
    """What safetensors itself does not write, and JSON allows, says the same."""
    pairs, written = build("linear")
    path = write_all(tmp_path, written) / "adapter_model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    fields = {"__metadata__": {"format": "pt"}, **json.loads(raw[8 : 8 + length])}
    if how in ("another order", "metadata last"):
        fields = dict(reversed(fields.items()))
    separators = None if how == "spaces" else (",", ":")
    text = json.dumps(fields, separators=separators)
    if how == "escapes":
        text = text.replace("layers", "l\\u0061yers")
    path.write_bytes(header(text, raw[8 + length :]))
    want = dense(pairs, GEOMETRY, 1, "up", 7 / RANK)
    torch.testing.assert_close(load_adapter(tmp_path, BASE).delta_weight(1, "up").double(), want, rtol=1e-5, atol=1e-5)


def test_more_tensors_side_by_side_than_one_call_reads(tmp_path: Path) -> None:
    """1,200 tensors of a layer; and the file is cut while it is read."""
    base = MoeGeometry.from_config(BASE | {"num_experts": 200, "num_hidden_layers": 1})
    pairs = random_pairs(base, RANK)
    path = write_all(tmp_path, formats.as_linear(pairs, base, RANK)) / "adapter_model.safetensors"
    want = dense(pairs, base, 0, "down", 7 / RANK)
    torch.testing.assert_close(load_adapter(tmp_path, base).delta_weight(0, "down").double(), want, rtol=1e-5, atol=1e-5)
    with files.TensorFiles([path]) as tensors:
        os.truncate(path, path.stat().st_size - 8)
        last = max(tensors.names, key=lambda name: tensors._entries[name].begin)
        with pytest.raises(AdapterError, match=f"{last} must be readable, got the end of the file"):
            tensors.read_stacks([([last], torch.empty(1, *tensors.shape(last)))])


def test_two_adapters_in_one_folder_are_refused(tmp_path: Path) -> None:
    """PEFT's and mlx-lm's files side by side; the same tensor in two files."""
    write_all(tmp_path, build("linear")[1])
    write_all(tmp_path, build("mlx")[1])
    with pytest.raises(
        AdapterError, match="path must hold one adapter, got adapter_model.safetensors and adapters.safetensors"
    ):
        load_adapter(tmp_path, BASE)
    (tmp_path / "adapters.safetensors").rename(tmp_path / "fused_expert_lora.safetensors")
    write_all(tmp_path, build("linear")[1])
    (tmp_path / "fused_expert_lora.safetensors").write_bytes((tmp_path / "adapter_model.safetensors").read_bytes())
    with pytest.raises(AdapterError, match="must be in one file of the adapter, got it in two"):
        load_adapter(tmp_path, BASE)


def test_a_file_of_ktransformers_is_found_from_either_path(tmp_path: Path) -> None:
    """The file with the attention alone would change nothing of the experts."""
    pairs, written = build("ktransformers")
    write_all(tmp_path, written)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors", tmp_path / "fused_expert_lora.safetensors"):
        adapter = load_adapter(path, BASE)
        want = dense(pairs, GEOMETRY, 0, "gate", 7 / RANK)
        torch.testing.assert_close(adapter.delta_weight(0, "gate").double(), want, rtol=1e-5, atol=1e-5)
        assert len(adapter.unused) == 1
