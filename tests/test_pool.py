"""`LoraPool`: slots at fixed addresses, exact loads, and loads that fail without a trace."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from moelora_ops import AdapterError, LoraAdapter, LoraPool
from moelora_ops.adapters import MoeGeometry, ProjectionLora
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.oracle import assert_bitwise

GATED = MoeGeometry(num_layers=5, moe_layers=(1, 4), num_experts=3, hidden_size=12, intermediate_size=10)
KINDS = (
    pytest.param(GATED, id="gated"),
    pytest.param(dataclasses.replace(GATED, interleaved=True), id="interleaved"),
    pytest.param(dataclasses.replace(GATED, gated=False), id="non-gated"),
)
BIG_STORES = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")


def pool_for(geometry: MoeGeometry, **options: Any) -> LoraPool:
    options = {"max_loras": 3, "max_rank": 16, "dtype": torch.float32} | options
    return LoraPool.from_config(geometry, **options)


def stores(pool: LoraPool) -> list[Tensor]:
    parts = [part for i in pool.layer_ids for part in (pool.layer(i), pool.layer(i).shared_outer) if part is not None]
    return [*(getattr(part, name) for part in parts for name in BIG_STORES), pool.lora_ranks, pool.adapter_enabled]


def snapshot(pool: LoraPool) -> list[Tensor]:
    return [t.clone() for t in stores(pool)]


def state(pool: LoraPool) -> list[tuple[int, bool]]:
    return [(pool.rank(slot), pool.is_enabled(slot)) for slot in range(pool.max_loras)]


def slot_delta(pool: LoraPool, layer_id: int, slot: int, projection: str) -> Tensor:
    """The dense change that a kernel sees in a slot, from all R columns: in fp64, natural row order."""
    layer, rank = pool.layer(layer_id), pool.max_rank
    if layer.shared_outer is not None and slot >= len(layer.lora_b13):
        layer, slot = layer.shared_outer, slot - len(layer.lora_b13)
    if projection == "down":
        return layer.lora_b2[slot].double() @ layer.lora_a2[slot].double()
    half = int(pool.gated and projection == "up")
    a = layer.lora_a13[slot, :, half * rank : (half + 1) * rank].double()
    rows = (
        slice(half, None, 2) if pool.interleaved else slice(half * pool.intermediate_size, (half + 1) * pool.intermediate_size)
    )
    return layer.lora_b13[slot, :, rows].double() @ a


@pytest.mark.parametrize("geometry", KINDS)
def test_a_loaded_slot_is_the_adapter(geometry: MoeGeometry) -> None:
    """Scaling is folded in, gate and up have their own A (sglang 27274), and nothing is left past the adapter's rank 8 of 16
    (sglang 21864), although the slot was full of NaN."""
    pool = pool_for(geometry)
    for tensor in stores(pool)[:-2]:
        tensor.fill_(torch.nan)
    adapter = random_adapter(geometry, rank=8)
    pool.load(adapter, 1)
    assert (pool.rank(1), pool.is_enabled(1)) == (8, True)
    assert pool.lora_ranks.tolist() == [0, 8, 0] and pool.adapter_enabled.tolist() == [0, 1, 0]
    for layer in geometry.moe_layers:
        for projection in ("gate", "up", "down") if geometry.gated else ("up", "down"):
            expected = adapter.delta_weight(layer, projection)
            assert expected is not None and expected.abs().max() > 0.1
            torch.testing.assert_close(slot_delta(pool, layer, 1, projection).float(), expected, rtol=0, atol=1e-6)
    for tensor in stores(pool)[:-2]:
        assert tensor[0].isnan().all() and tensor[2].isnan().all()  # other slots untouched


def test_scaling_is_multiplied_in_fp32_and_rounded_once() -> None:
    """bf16(fp32(B) * s), not bf16(bf16(B) * bf16(s))."""
    pool = pool_for(GATED, dtype=torch.bfloat16)
    adapter = random_adapter(GATED, rank=16)
    pool.load(adapter, 0)
    down = adapter.layers[4]["down"]
    assert_bitwise(pool.layer(4).lora_b2[0], (down.b * down.scaling[:, None, None]).bfloat16())
    twice = down.b.bfloat16() * down.scaling.bfloat16()[:, None, None]
    assert not torch.equal(pool.layer(4).lora_b2[0], twice)


def test_a_swap_keeps_addresses_and_forgets_the_old_adapter() -> None:
    """Rank 16 on every layer, then rank 4 on one projection of one layer: the rest of the slot is zero, at the same places."""
    pool = pool_for(GATED)
    addresses, objects = [t.data_ptr() for t in stores(pool)], pool.layer(4)
    pool.load(random_adapter(GATED, rank=16), 2)
    small = random_adapter(GATED, rank=4, layers=[4], projections=["up"], seed=1)
    pool.load(small, 2)
    assert [t.data_ptr() for t in stores(pool)] == addresses and pool.layer(4) is objects
    fresh = pool_for(GATED)
    fresh.load(small, 2)
    for got, want in zip(stores(pool), stores(fresh)):
        assert_bitwise(got, want)


def test_unload_leaves_an_empty_slot() -> None:
    """Disabled, rank 0, zeros; the neighbours stay."""
    pool, untouched = pool_for(GATED), pool_for(GATED)
    for slot in range(3):
        pool.load(random_adapter(GATED, rank=5, seed=slot), slot)
    for slot in (0, 2):
        untouched.load(random_adapter(GATED, rank=5, seed=slot), slot)
    pool.unload(1)
    for got, want in zip(stores(pool), stores(untouched)):
        assert_bitwise(got, want)
    assert state(pool) == [(5, True), (0, False), (5, True)]


def test_disable_and_enable_keep_the_weights() -> None:
    """Only adapter_enabled changes; an empty slot cannot be enabled."""
    pool = pool_for(GATED)
    pool.load(random_adapter(GATED, rank=3), 0)
    before = snapshot(pool)
    pool.disable(0)
    assert pool.adapter_enabled.tolist() == [0, 0, 0] and state(pool)[0] == (3, False)
    pool.enable(0)
    for got, want in zip(stores(pool), before):
        assert_bitwise(got, want)
    with pytest.raises(ValueError, match="empty slot 1"):
        pool.enable(1)


def test_matrices_shared_by_all_experts_are_spread() -> None:
    """A leading dimension of 1 serves every expert."""
    one = random_adapter(dataclasses.replace(GATED, num_experts=1), rank=4)
    pool = pool_for(GATED)
    pool.load(dataclasses.replace(one, geometry=GATED), 0)
    expected = dataclasses.replace(one, geometry=GATED).delta_weight(1, "down")
    assert expected is not None and expected.shape[0] == 3
    torch.testing.assert_close(slot_delta(pool, 1, 0, "down").float(), expected, rtol=0, atol=1e-6)


def test_an_adapter_without_expert_tensors_is_no_delta() -> None:
    """Attention-only adapters load: rank 0."""
    pool = pool_for(GATED)
    pool.load(random_adapter(GATED, rank=16), 0)
    pool.load(LoraAdapter("attention only", GATED, {}), 0)
    assert state(pool)[0] == (0, True) and all(not t[0].any() for t in stores(pool)[:-2])


def edited(layer: int = 4, projection: str = "down", **changes: Tensor) -> LoraAdapter:
    """A good adapter with one projection changed."""
    good = random_adapter(GATED, rank=4, seed=9)
    layers = {i: dict(p) for i, p in good.layers.items()}
    base = good.layers[4].get(projection, good.layers[4]["up"])
    layers.setdefault(layer, {})[projection] = dataclasses.replace(base, **changes)
    return dataclasses.replace(good, layers=layers)


def with_value(part: str, value: float) -> LoraAdapter:
    tensor = getattr(random_adapter(GATED, rank=4, seed=9).layers[4]["down"], part).clone()
    tensor.view(-1)[-1] = value
    return edited(**{part: tensor})


def with_geometry(**changes: Any) -> LoraAdapter:
    return random_adapter(dataclasses.replace(GATED, **changes), rank=4)


REFUSALS: dict[str, tuple[Callable[[], LoraAdapter], int, str]] = {
    "rank above the pool's": (lambda: random_adapter(GATED, rank=17), 0, "rank must be <= max_rank = 16"),
    "other number of experts": (lambda: with_geometry(num_experts=4), 0, "num_experts must be 3"),
    "other hidden size": (lambda: with_geometry(hidden_size=13), 0, "hidden_size must be 12"),
    "other intermediate size": (lambda: with_geometry(intermediate_size=9), 0, "intermediate_size must be 10"),
    "non-gated adapter": (lambda: with_geometry(gated=False), 0, "gated must be True"),
    "layer that is not in the pool": (lambda: edited(layer=2), 0, "layers must be among"),
    "unknown projection": (lambda: edited(projection="router"), 0, "projection must be one of"),
    "A of another width": (lambda: edited(a=torch.zeros(3, 4, 11)), 0, "layer 4 down.a must have shape"),
    "B of another rank": (lambda: edited(b=torch.zeros(3, 12, 5)), 0, "layer 4 down.b must have shape"),
    "B for too few experts": (lambda: edited(b=torch.zeros(2, 12, 4)), 0, "layer 4 down.b must have shape"),
    "scaling of another shape": (lambda: edited(scaling=torch.ones(3, 4)), 0, "layer 4 down.scaling must have shape"),
    "NaN in A": (lambda: with_value("a", torch.nan), 0, "layer 4 down A must be finite"),
    "inf in B": (lambda: with_value("b", torch.inf), 0, "layer 4 down scaling . B must be finite"),
    "NaN in scaling": (lambda: with_value("scaling", torch.nan), 0, "layer 4 down scaling . B must be finite"),
    "A overflows fp16": (lambda: with_value("a", 1e5), 0, "A must be finite in float16"),
    "scaling * B overflows fp16": (lambda: with_value("scaling", 1e6), 0, "scaling . B must be finite in float16"),
    "A of two dimensions": (lambda: edited(a=torch.zeros(4)), 0, "layer 4 down.a must be 3-dimensional"),
    "no A": (lambda: edited(a=None), 0, "layer 4 down.a must be a dense .* tensor, got NoneType"),  # type: ignore[arg-type]
    "complex B": (lambda: edited(b=torch.zeros(3, 12, 4) * 1j), 0, "layer 4 down.b must be a dense .* got .* torch.complex64"),
    "int8 A": (lambda: edited(a=torch.ones(3, 4, 10, dtype=torch.int8)), 0, "layer 4 down.a must be a dense"),
    "sparse B": (lambda: edited(b=torch.ones(3, 12, 4).to_sparse()), 0, "layer 4 down.b must be a dense"),
    "slot past the end": (lambda: edited(), 3, "slot must be in"),
    "negative slot": (lambda: edited(), -1, "slot must be in"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_failed_load_changes_nothing(why: str) -> None:
    """Every bit of every slot, the ranks and the switches are as before, and the error says what did not fit."""
    make, slot, message = REFUSALS[why]
    pool = pool_for(GATED, dtype=torch.float16)
    pool.load(random_adapter(GATED, rank=16), 0)
    pool.load(random_adapter(GATED, rank=2), 1)
    pool.disable(1)
    before, state_before = snapshot(pool), state(pool)
    with pytest.raises(ValueError, match=message):
        pool.load(make(), slot)
    for got, want in zip(stores(pool), before):
        assert_bitwise(got, want)
    assert state(pool) == state_before
    good = edited()
    pool.load(good, 0)  # and the edited adapter without its edit is fine
    assert pool.rank(0) == 4


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "max_rank", {"max_rank": 0}),
        (ValueError, "max_loras", {"max_loras": -1}),
        (TypeError, "dtype", {"dtype": torch.int8}),
        (TypeError, "hidden_size", {"hidden_size": 4.0}),
        (ValueError, "layers", {"layers": []}),
        (ValueError, "layers", {"layers": [3, 3]}),
        (TypeError, "layers", {"layers": [1.5]}),
        (TypeError, "layers", {"layers": ["0"]}),
        (TypeError, "layers", {"layers": None}),
        (ValueError, "interleaved", {"gated": False, "interleaved": True}),
        (ValueError, "shared_outer", {"shared_outer": 3}),
        (ValueError, "shared_outer", {"shared_outer": -1}),
        (TypeError, "shared_outer", {"shared_outer": "all"}),
    ],
)
def test_bad_sizes_are_named(error: type[Exception], name: str, options: dict[str, Any]) -> None:
    """The error's first word is the argument to blame."""
    sizes = dict(layers=2, max_loras=2, max_rank=8, num_experts=2, hidden_size=4, intermediate_size=4)
    LoraPool(**sizes)  # type: ignore[arg-type]
    with pytest.raises(error, match=f"^{name}"):
        LoraPool(**(sizes | options))  # type: ignore[arg-type]


def test_a_pool_made_in_inference_mode_loads_outside_and_inside() -> None:
    """Engines build the model under inference_mode and load adapters later."""
    with torch.inference_mode():
        pool = pool_for(GATED)
    pool.load(random_adapter(GATED, rank=2), 0)
    with torch.inference_mode():
        pool.load(random_adapter(GATED, rank=4), 1)
        pool.unload(0)
    pool.disable(1)
    assert state(pool)[:2] == [(0, False), (4, False)]


def test_a_slot_may_be_loaded_from_itself() -> None:
    """The slot is cleared before it is written: an adapter of views of it must not be cleared with it."""
    pool = pool_for(GATED)
    pool.load(random_adapter(GATED, rank=16), 0)
    layer = pool.layer(4)
    a, b = layer.lora_a2[0], layer.lora_b2[0]
    want = a.clone(), b.clone()
    pool.load(LoraAdapter("views", GATED, {4: {"down": ProjectionLora(a, b, torch.ones(3))}}), 0)
    for got, expected in zip((a, b), want):
        assert_bitwise(got, expected)


def test_gate_and_up_may_be_swapped_within_a_slot() -> None:
    """Views of what is written first: they are read before."""
    pool, one = pool_for(GATED), torch.ones(3)
    pool.load(random_adapter(GATED, rank=16), 0)
    gate, up = slot_delta(pool, 4, 0, "gate"), slot_delta(pool, 4, 0, "up")
    a, b = pool.layer(4).lora_a13[0], pool.layer(4).lora_b13[0]
    swapped = {"gate": ProjectionLora(a[:, 16:], b[:, 10:], one), "up": ProjectionLora(a[:, :16], b[:, :10], one)}
    pool.load(LoraAdapter("swapped", GATED, {4: swapped}), 0)
    assert_bitwise(slot_delta(pool, 4, 0, "gate"), up)
    assert_bitwise(slot_delta(pool, 4, 0, "up"), gate)


def test_other_things_than_adapters_and_layers_are_refused() -> None:
    """TypeError for what is no adapter, and for a path where the pool does not know the base; ValueError for other layers."""
    pool = pool_for(GATED)
    with pytest.raises(TypeError, match="adapter must be a LoraAdapter, or a path .*, got int"):
        pool.load(3, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="options must not be given with a LoraAdapter, got strict"):
        pool.load(random_adapter(GATED, rank=2), 0, strict=True)
    with pytest.raises(TypeError, match="a path for a pool made by from_config, got str"):
        LoraPool(1, max_loras=1, max_rank=4, num_experts=2, hidden_size=4, intermediate_size=4).load("some/path", 0)
    with pytest.raises(TypeError, match="slot must be an int"):
        pool.load(random_adapter(GATED, rank=2), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer_id must be one of"):
        pool.layer(0)


def test_adapter_error_is_a_value_error() -> None:
    """Callers may catch either."""
    assert issubclass(AdapterError, ValueError)


def test_delta_weight_of_what_is_not_there() -> None:
    """None without the layer or projection; a half that is missing is zeros in gate_up; no other names."""
    adapter = random_adapter(GATED, rank=2, layers=[4], projections=["up"])
    assert adapter.delta_weight(1, "up") is None and adapter.delta_weight(4, "down") is None
    both, up = adapter.delta_weight(4, "gate_up"), adapter.delta_weight(4, "up")
    assert both is not None and up is not None
    assert_bitwise(both, torch.cat([torch.zeros_like(up), up], dim=1))
    with pytest.raises(ValueError, match="projection must be"):
        adapter.delta_weight(4, "router")
    plain = random_adapter(dataclasses.replace(GATED, gated=False), rank=2)
    assert plain.delta_weight(4, "gate_up") is None and plain.delta_weight(4, "up") is not None
    assert isinstance(plain.layers[4]["up"], ProjectionLora)
