"""`LoraPool.load`: values as every dtype and layout stores them, refusals at every tensor, paths, progress, memory."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelora_ops import AdapterError, LoraAdapter, load_adapter
from moelora_ops.adapters import MoeGeometry, ProjectionLora, factors
from moelora_ops.testing.adapter_files import BASE, fused, per_expert, write
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.oracle import assert_bitwise

from .test_pool import GATED, pool_for, slot_delta, snapshot, state, stores
from .test_shared_outer import shared_adapter

STORAGE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POOLS = (torch.float32, torch.bfloat16, torch.float16)


def uniform(adapter: LoraAdapter, scaling: float) -> LoraAdapter:
    layers = {
        i: {name: dataclasses.replace(p, scaling=torch.tensor([scaling])) for name, p in projections.items()}
        for i, projections in adapter.layers.items()
    }
    return dataclasses.replace(adapter, layers=layers)


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("scaling", [None, 1.0, 1.7])
@pytest.mark.parametrize("rank", [5, 16])
def test_every_storage_dtype_is_folded_in_fp32_and_rounded_once(
    dtype: torch.dtype, pool_dtype: torch.dtype, scaling: float | None, rank: int
) -> None:
    """A is cast, B is fp32(B) * fp32(s) cast once; scalings of each expert, of all, and 1."""
    adapter = random_adapter(GATED, rank=rank, dtype=dtype)
    adapter = adapter if scaling is None else uniform(adapter, scaling)
    pool = pool_for(GATED, dtype=pool_dtype)
    pool.load(adapter, 0)
    down, layer = adapter.layers[4]["down"], pool.layer(4)
    assert_bitwise(layer.lora_a2[0, :, :rank], down.a.to(pool_dtype))
    assert_bitwise(layer.lora_b2[0, ..., :rank], (down.b.float() * down.scaling[:, None, None]).to(pool_dtype))
    assert not layer.lora_a2[0, :, rank:].any() and not layer.lora_b2[0, ..., rank:].any()


def views(adapter: LoraAdapter, kind: str) -> LoraAdapter:
    """The same values lying otherwise in memory."""

    def lay(tensor: Tensor) -> Tensor:
        if kind == "expert fastest":  # PEFT's fused lora_B
            return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        if kind == "transposed":
            return tensor.mT.contiguous().mT
        if kind == "every second row":  # a half of an interleaved gate_up
            return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=2).flatten(1, 2)[:, 0::2]
        return tensor[:1].expand_as(tensor)

    layers = {
        i: {name: ProjectionLora(lay(p.a), lay(p.b), p.scaling) for name, p in projections.items()}
        for i, projections in adapter.layers.items()
    }
    return dataclasses.replace(adapter, layers=layers)


@pytest.mark.parametrize("kind", ["expert fastest", "transposed", "every second row", "expanded"])
@pytest.mark.parametrize("piece", [1, 100, factors.PIECE])
def test_views_load_as_their_values_in_pieces_of_any_size(kind: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise as contiguous copies; NaN beside a view is not looked at, NaN in it is."""
    monkeypatch.setattr(factors, "PIECE", piece)
    plain = random_adapter(GATED, rank=7, dtype=torch.bfloat16)
    plain = views(plain, kind) if kind == "expanded" else plain
    pool, want = pool_for(GATED, dtype=torch.bfloat16), pool_for(GATED, dtype=torch.bfloat16)
    pool.load(views(plain, kind), 1)
    copies = {
        i: {name: ProjectionLora(p.a.clone(), p.b.clone(), p.scaling) for name, p in projections.items()}
        for i, projections in plain.layers.items()
    }
    want.load(dataclasses.replace(plain, layers=copies), 1)
    for got, expected in zip(stores(pool), stores(want)):
        assert_bitwise(got, expected)
    plain.layers[4]["gate"].b[0, 4, 3] = torch.nan
    with pytest.raises(AdapterError, match="layer 4 gate scaling . B must be finite"):
        pool.load(views(plain, kind), 1)


TENSORS = [(layer, name, part) for layer in GATED.moe_layers for name in ("gate", "up", "down") for part in "ab"]


@pytest.mark.parametrize(("layer", "name", "part"), TENSORS, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2e5, -2e5])
@pytest.mark.parametrize("shared_outer", [False, True])
def test_a_bad_value_in_any_tensor_leaves_the_slot(layer: int, name: str, part: str, value: float, shared_outer: bool) -> None:
    """NaN, infinities and what overflows fp16, at any place of any tensor: named, and no bit of the pool changes."""
    pool = pool_for(GATED, dtype=torch.float16, shared_outer=shared_outer)
    make = shared_adapter if shared_outer else random_adapter
    pool.load(make(GATED, 16), 0)
    before, state_before = snapshot(pool), state(pool)
    adapter = make(GATED, 4, seed=1)
    tensor = getattr(adapter.layers[layer][name], part).view(-1)
    tensor[(7 * layer + len(name)) % len(tensor)] = value
    with pytest.raises(AdapterError, match=f"layer {layer} {name} (A|scaling . B) must be finite in float16"):
        pool.load(adapter, 0)
    for got, want in zip(stores(pool), before):
        assert_bitwise(got, want)
    assert state(pool) == state_before


def test_values_near_the_end_of_a_dtype() -> None:
    """What rounds to the largest fp16 loads, what rounds to inf does not; a large value and a large scaling of different
    experts are no overflow."""
    pool, adapter = pool_for(GATED, dtype=torch.float16), uniform(random_adapter(GATED, rank=4), 1.0)
    adapter.layers[4]["up"].a[1, 2, 3] = 65519.0
    pool.load(adapter, 0)
    assert pool.layer(4).lora_a13[0, 1, 16 + 2, 3] == 65504
    adapter.layers[4]["up"].a[1, 2, 3] = 65520.0
    with pytest.raises(AdapterError, match="layer 4 up A must be finite in float16"):
        pool.load(adapter, 0)
    apart = random_adapter(GATED, rank=4)
    apart.layers[4]["down"].b[0, 0, 0], apart.layers[4]["down"].scaling[:] = 6e4, torch.tensor([1.0, 1.0, 2.0])
    pool.load(apart, 0)
    assert pool.layer(4).lora_b2[0, 0, 0, 0] == torch.tensor(6e4).half()
    apart.layers[4]["down"].scaling[:] = torch.tensor([2.0, 1.0, 1.0])
    with pytest.raises(AdapterError, match="layer 4 down scaling . B must be finite"):
        pool.load(apart, 0)


def test_an_interrupted_write_leaves_the_slot_empty() -> None:
    """A progress that raises while the factors are checked changes nothing; while they are written, it ends with no adapter."""
    pool, before = pool_for(GATED), []
    pool.load(random_adapter(GATED, rank=16), 1)
    for step in range(1, 5):  # two layers are checked, two are written
        pool.load(random_adapter(GATED, rank=16), 0)
        before = snapshot(pool)

        def interrupt(done: int, total: int, step: int = step) -> None:
            assert total == 4
            if done == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool.load(random_adapter(GATED, rank=4, seed=5), 0, progress=interrupt)
        if step <= 2:
            for got, want in zip(stores(pool), before):
                assert_bitwise(got, want)
        else:
            assert state(pool)[0] == (0, False) and all(not t[0].any() for t in stores(pool))
        assert state(pool)[1] == (16, True)


def test_progress_is_a_callback_a_line_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps come in order and end at the total; nothing is written to a stderr that is no terminal, nor for a quick load."""
    pool, adapter, steps = pool_for(GATED), random_adapter(GATED, rank=4), []
    pool.load(adapter, 0, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    stderr, quiet = io.StringIO(), "moelora_ops.adapters.progress._QUIET_SECONDS"
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(quiet, -1.0)  # even a load that takes long
    pool.load(adapter, 0)
    pool.load(adapter, 0, progress=False)
    monkeypatch.setattr(quiet, 100.0)
    monkeypatch.setattr(stderr, "isatty", lambda: True, raising=False)
    pool.load(adapter, 0)
    assert stderr.getvalue() == ""
    monkeypatch.setattr(quiet, -1.0)
    pool.load(adapter, 0)
    line = "".join(f"\rloading random: {done:3d} %" for done in (25, 50, 75, 100)) + "\n"
    assert stderr.getvalue() == line
    monkeypatch.setattr(quiet, 100.0)
    pool.load(adapter, 0, progress=True)
    assert stderr.getvalue() == 2 * line
    with pytest.raises(TypeError, match="^progress must be None, a bool or a callable"):
        pool.load(adapter, 0, progress=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("files", [per_expert, fused], ids=lambda f: f.__name__)
def test_a_path_loads_like_its_adapter(files: Any, tmp_path: Path) -> None:
    """The pool reads with its own base and rank; options are those of load_adapter, refusals leave the slot."""
    folder = write(tmp_path, *files())
    pool, want = (pool_for(MoeGeometry.from_config(BASE), max_rank=8) for _ in range(2))
    pool.load(folder, 1)
    want.load(load_adapter(folder, BASE), 1)
    for got, expected in zip(stores(pool), stores(want)):
        assert_bitwise(got, expected)
    assert slot_delta(pool, 1, 1, "down").abs().max() > 0.1
    with pytest.raises(AdapterError, match="rank must be <= max_rank = 2, got 4"):
        pool_for(MoeGeometry.from_config(BASE), max_rank=2).load(str(folder), 0)
    with pytest.raises(ValueError, match="b_packing"):
        pool.load(folder, 1, b_packing="other")
    for got, expected in zip(stores(pool), stores(want)):
        assert_bitwise(got, expected)


def test_a_short_read_is_continued_and_a_failed_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call may give less than it was asked for."""
    folder = write(tmp_path, *per_expert())
    want, preadv = load_adapter(folder, BASE), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:7]], at))
    got = load_adapter(folder, BASE)
    assert_bitwise(got.layers[2]["up"].b, want.layers[2]["up"].b)

    def fail(*args: Any) -> int:
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(AdapterError, match="layers.1.mlp.experts.0.* must be readable, got: Input/output error"):
        load_adapter(folder, BASE)


MEMORY = """
import json, sys
import torch
from moelora_ops import LoraPool

def peak():  # ru_maxrss would begin with that of the process that started this one
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder, base = sys.argv[1], json.loads(sys.argv[2])
pool = LoraPool.from_config(base, max_loras=1, max_rank=16, dtype=torch.bfloat16)
for layer in pool.layer_ids:  # the slot's own memory is there before
    for name in ("a13", "b13", "a2", "b2"):
        getattr(pool.layer(layer), "lora_" + name).fill_(1)
pool.layer(0).lora_b2.float().aminmax()  # and so is what a first call allocates
before = peak()
pool.load(folder, 0)
print(json.dumps([peak() - before, pool.rank(0)]))
"""
WIDE = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "num_experts": 64, "hidden_size": 1024, "moe_intermediate_size": 512}


def big_files(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rank 16 at sizes of a small real model, bf16."""
    config, _ = fused() if kind == "fused" else per_expert()
    experts, hidden, inner, rank = 64, 1024, 512, 16
    stem, tensors = "base_model.model.model.layers.{}.mlp.experts", {}

    def pair(name: str, a: tuple[int, int], b: tuple[int, int]) -> None:
        tensors[f"{name}.lora_A.weight"] = torch.ones(a, dtype=torch.bfloat16)
        tensors[f"{name}.lora_B.weight"] = torch.ones(b, dtype=torch.bfloat16)

    for layer in range(8):
        name = stem.format(layer)
        if kind == "fused":
            pair(f"{name}.base_layer", (experts * rank, hidden), (2 * inner, rank * experts))
            pair(name, (experts * rank, inner), (hidden, rank * experts))
            continue
        for expert in range(experts):
            pair(f"{name}.{expert}.down_proj", (rank, inner), (hidden, rank))
            for half in ("gate", "up"):
                pair(f"{name}.{expert}.{half}_proj", (rank, hidden), (inner, rank))
    return config | {"r": rank}, tensors


@pytest.mark.parametrize("kind", ["per expert", "fused"])
def test_a_load_needs_little_more_memory_than_the_file_has(kind: str, tmp_path: Path) -> None:
    """At most 1.2 times its size on the host, beside the slot: neither the factors nor the file are held twice."""
    folder = write(tmp_path, *big_files(kind))
    size = (folder / "adapter_model.safetensors").stat().st_size
    command = [sys.executable, "-c", MEMORY, str(folder), json.dumps(WIDE)]
    needed, rank = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert rank == 16 and size > 50e6
    assert needed <= 1.2 * size, f"{needed / size:.2f} times the file's {size / 1e6:.0f} MB"
