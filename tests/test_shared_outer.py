"""Shared-outer slots: one A of gate and up and one B of down for all experts, alone in a pool and beside other slots."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops import AdapterError, FusedMoEWithLoRA, LoraAdapter, LoraPool, layers
from moelora_ops.adapters import MoeGeometry, PoolLayer
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.cases import CASES, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts

from .test_layers import around_callables, around_weights, callable_case, run
from .test_pool import GATED, KINDS, pool_for, slot_delta, snapshot, state, stores


def shared_adapter(geometry: MoeGeometry, rank: int, seed: int = 0) -> LoraAdapter:
    """A random adapter whose experts share A of gate and up, and B and scaling of down."""
    adapter = random_adapter(geometry, rank, seed=seed, name="shared")
    one = {"gate": ("a",), "up": ("a",), "down": ("b", "scaling")}
    layers = {
        i: {
            name: dataclasses.replace(p, **{part: getattr(p, part)[:1] for part in one[name]})
            for name, p in projections.items()
        }
        for i, projections in adapter.layers.items()
    }
    return dataclasses.replace(adapter, layers=layers)


def assert_slot_is(pool: LoraPool, slot: int, adapter: LoraAdapter) -> None:
    for layer in pool.layer_ids:
        for projection in ("gate", "up", "down") if pool.gated else ("up", "down"):
            expected = adapter.delta_weight(layer, projection)
            if expected is None:
                expected = torch.zeros_like(slot_delta(pool, layer, slot, projection)).float()
            torch.testing.assert_close(slot_delta(pool, layer, slot, projection).float(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("shared_outer", [True, 2])
def test_what_is_shared_lies_once_in_the_pool(geometry: MoeGeometry, shared_outer: bool | int) -> None:
    """A13 and B2 have an expert dimension of 1, the slot is the adapter, and its neighbours and the tail of its ranks are as
    they must be although all was NaN; beside slots of the other kind as well."""
    pool = pool_for(geometry, shared_outer=shared_outer)
    adapter = shared_adapter(geometry, rank=8)
    for layer_id in pool.layer_ids:
        layer = pool.layer(layer_id)
        layer = layer if shared_outer is True else layer.shared_outer
        assert layer is not None and len(layer.lora_b13) == len(layer.lora_a2) == len(layer.lora_ranks) == int(
            pool.shared_outer
        )
        assert layer.lora_a13.shape[:2] == layer.lora_b2.shape[:2] == (pool.shared_outer, 1)
        assert layer.lora_b13.shape[1] == layer.lora_a2.shape[1] == geometry.num_experts
    for tensor in stores(pool)[:-2]:
        tensor.fill_(torch.nan)
    pool.load(adapter, 2)
    assert_slot_is(pool, 2, adapter)
    assert state(pool) == [(0, False), (0, False), (8, True)] and pool.lora_ranks.tolist() == [0, 0, 8]
    last = [t for t in stores(pool)[:-2] if len(t) == pool.shared_outer and len(t) != 1]
    assert last and all(t[-2].isnan().all() and not t[-1].isnan().any() for t in last)


def test_the_memory_of_both_kinds() -> None:
    """Per layer and slot E R (3H + 3I), and R (3H + 3 I E) where the side of H is shared."""
    hidden, inner, experts, rank, layers = 12, 10, 3, 16, 2

    def elements(**options: Any) -> int:
        return sum(t.numel() for t in stores(pool_for(GATED, **options))[:-2])

    per_expert, shared = layers * rank * experts * 3 * (hidden + inner), layers * rank * 3 * (hidden + inner * experts)
    assert elements() == 3 * per_expert
    assert elements(shared_outer=True) == 3 * shared
    assert elements(shared_outer=1) == 2 * per_expert + shared


def test_an_adapter_that_shares_nothing_is_refused_by_name() -> None:
    """Gate's A, then down's B, then its scaling: the error says which, and the slot stays as it was."""
    pool, good, plain = pool_for(GATED, shared_outer=1), shared_adapter(GATED, 4), random_adapter(GATED, 4)
    pool.load(good, 2)
    before = snapshot(pool)
    for layer, name, part, message in (
        (1, "gate", "a", "layer 1 gate A must be shared by all experts for shared-outer slot 2, got 3 experts"),
        (4, "up", "a", "layer 4 up A must be shared"),
        (4, "down", "b", "layer 4 down B and scaling must be shared"),
        (4, "down", "scaling", "layer 4 down B and scaling must be shared"),
    ):
        layers = {i: dict(p) for i, p in good.layers.items()}
        layers[layer][name] = dataclasses.replace(layers[layer][name], **{part: getattr(plain.layers[layer][name], part)})
        adapter = dataclasses.replace(good, layers=layers)
        assert good.shared_outer and not adapter.shared_outer
        with pytest.raises(AdapterError, match=message):
            pool.load(adapter, 2)
        for got, want in zip(stores(pool), before):
            assert_bitwise(got, want)
        pool.load(adapter, 1)  # a slot of the other kind takes it
        assert_slot_is(pool, 1, adapter)
        pool.unload(1)


def test_free_slot_prefers_the_smaller_kind() -> None:
    """Shared-outer adapters go to shared-outer slots while there are any, then to others; the rest never goes there."""
    pool, shared, plain = pool_for(GATED, shared_outer=1), shared_adapter(GATED, 4), random_adapter(GATED, 4)
    assert (pool.free_slot(shared), pool.free_slot(plain)) == (2, 0)
    pool.load(shared, 2)
    assert pool.free_slot(shared) == 0
    for slot in (0, 1):
        pool.load(plain, slot)
    pool.unload(2)
    assert pool.free_slot(shared) == 2
    with pytest.raises(ValueError, match="random: a free slot must be left"):
        pool.free_slot(plain)


actions = st.lists(st.tuples(st.sampled_from(["shared", "plain", "none"]), st.integers(0, 3), st.integers(1, 6)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(steps=actions, shared_outer=st.integers(0, 4), interleaved=st.booleans())
def test_any_sequence_of_loads_leaves_each_slot_its_last_adapter(steps: Any, shared_outer: int, interleaved: bool) -> None:
    """Smaller ranks over larger ones, kinds in turn, refusals and unloads in between: no slot sees another's."""
    geometry = dataclasses.replace(GATED, interleaved=interleaved)
    pool = pool_for(geometry, max_loras=4, max_rank=6, shared_outer=shared_outer)
    expected = {slot: LoraAdapter("empty", geometry, {}) for slot in range(4)}
    for seed, (kind, slot, rank) in enumerate(steps):
        if kind == "none":
            pool.unload(slot)
            expected[slot] = LoraAdapter("empty", geometry, {})
            continue
        adapter = (shared_adapter if kind == "shared" else random_adapter)(geometry, rank, seed=seed)
        if kind == "plain" and slot >= 4 - shared_outer:
            with pytest.raises(AdapterError):
                pool.load(adapter, slot)
            continue
        pool.load(adapter, slot)
        expected[slot] = adapter
    for slot, adapter in expected.items():
        assert_slot_is(pool, slot, adapter)
        assert pool.rank(slot) == adapter.rank == pool.lora_ranks[slot]


def both_kinds(inputs: Inputs, per_expert: int) -> tuple[Inputs, PoolLayer]:
    """The same inputs with all slots after `per_expert` shared-outer (expanded for the reference), and the pool's layer."""
    shared = {}
    for name in ("lora_a13", "lora_b2"):
        tensor = getattr(inputs, name).clone()
        tensor[per_expert:] = tensor[per_expert:, :1]
        shared[name] = tensor
    inputs = inputs.replace(**shared)
    slots = inputs.case.max_loras
    ranks, on = inputs.lora_ranks, inputs.adapter_enabled
    ranks = torch.full((slots,), inputs.case.max_lora_rank, dtype=torch.int32) if ranks is None else ranks
    on = torch.ones(slots, dtype=torch.int32) if on is None else on[:slots].int()

    def part(rows: slice, outer: slice) -> tuple[Tensor, ...]:
        return (
            inputs.lora_a13[rows, outer],
            inputs.lora_b13[rows],
            inputs.lora_a2[rows],
            inputs.lora_b2[rows, outer],
            ranks[rows],
        )

    last = PoolLayer(*part(slice(per_expert, None), slice(1)), on[per_expert:], inputs.case.interleaved)
    first = PoolLayer(*part(slice(per_expert), slice(None)), on, inputs.case.interleaved, last)
    return inputs, first


@pytest.mark.parametrize("case", [c for c in CASES if c.max_loras > 1 and not c.shared_outer], ids=str)
@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_slots_of_both_kinds_in_one_batch(build: Any, case: Case) -> None:
    """Every token gets its own adapter's delta, and rows without one are bitwise the base's, whatever kind its mates have."""
    case = callable_case(case) if build is around_callables else case
    inputs, lora = both_kinds(case.make(), per_expert=1)
    runner = build(inputs)
    runner.lora = lora
    without = run(runner, inputs, adapters=False)
    expected, base = exact_experts(inputs), exact_experts(inputs, adapters=False)
    assert_delta_close(run(runner, inputs), without, expected, base)


@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_nothing_of_the_other_kind_is_read(build: Any) -> None:
    """With one kind full of NaN, tokens of the other and of none keep every bit."""
    inputs, lora = both_kinds(Case("kinds", num_tokens=30, max_loras=4).make(), per_expert=2)
    runner = build(inputs)
    runner.lora = lora
    clean, slots = run(runner, inputs), inputs.token_lora_mapping
    assert lora.shared_outer is not None
    for kind, others in ((lora, slots >= 2), (lora.shared_outer, (slots >= 0) & (slots < 2))):
        poison = {f"lora_{n}": torch.full_like(getattr(kind, f"lora_{n}"), torch.nan) for n in ("a13", "b13", "a2", "b2")}
        poisoned = dataclasses.replace(kind, **poison)
        runner.lora = poisoned if kind is lora else dataclasses.replace(lora, shared_outer=poisoned)
        got, keep = run(runner, inputs), others | (slots < 0)
        assert_bitwise(got[keep], clean[keep])
        assert got[~keep].isnan().any()


def test_every_pair_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of the op, each with the pairs of its own kind: the base's work does not double."""
    inputs, lora = both_kinds(Case("kinds", num_tokens=30, max_loras=4).make(), per_expert=2)
    runner, seen, op = around_weights(inputs), [], layers.fused_experts_lora
    runner.lora = lora
    monkeypatch.setattr(layers, "fused_experts_lora", lambda *args, **kwargs: (seen.append(args[4]), op(*args, **kwargs))[1])
    run(runner, inputs)
    assert len(seen) == 2 and seen[0].ge(0).logical_xor(seen[1].ge(0)).all()
    assert_bitwise(torch.maximum(*seen), inputs.topk_ids)
    last = (inputs.token_lora_mapping >= 2)[:, None].expand(-1, 2)
    assert last.any() and not last.all() and seen[1].ge(0).equal(last)


def test_bad_inputs_of_both_kinds_are_named() -> None:
    """The split looks at ids and mapping before the op does."""
    inputs, lora = both_kinds(Case("kinds").make(), per_expert=1)
    runner = around_weights(inputs)
    runner.lora = lora
    for error, name, value in (
        (ValueError, "token_lora_mapping", torch.zeros(12, dtype=torch.int32)),
        (TypeError, "token_lora_mapping", torch.zeros(13)),
        (TypeError, "topk_ids", torch.zeros(13, 2)),
        (ValueError, "topk_ids", torch.zeros(13, dtype=torch.int32)),
    ):
        with pytest.raises(error, match=f"^{name}"):
            run(runner, inputs.replace(**{name: value}))


def test_compiled_once_for_both_kinds() -> None:
    """fullgraph, and loads into slots of either kind are seen without a compile."""
    geometry = MoeGeometry(1, (0,), 4, 24, 16)
    pool = LoraPool.from_config(geometry, max_loras=3, max_rank=8, dtype=torch.float32, shared_outer=2)
    inputs = Case("c", num_experts=4, hidden_size=24, intermediate_size=16, num_tokens=12, adapters="distinct").make()
    module = FusedMoEWithLoRA(inputs.w13, inputs.w2, pool.layer(0))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    results = [run(compiled, inputs)]
    base = run(module, inputs, adapters=False)
    assert_bitwise(results[0], base)
    for slot, adapter in (
        (0, random_adapter(geometry, 8)),
        (1, shared_adapter(geometry, 4)),
        (2, shared_adapter(geometry, 8, 1)),
    ):
        pool.load(adapter, slot)
        results.append(run(compiled, inputs))
        assert_bitwise(results[-1], run(module, inputs))
        changed = (results[-1] != results[-2]).any(-1)
        assert changed.equal(inputs.token_lora_mapping == slot)
    for slot in range(3):
        pool.disable(slot)
    assert_bitwise(run(compiled, inputs), base)
    assert counter.frame_count == 1


@pytest.mark.parametrize("shared_outer", [0, 1])
def test_a_copy_of_a_module_is_served_by_the_same_pool(shared_outer: int) -> None:
    """Base weights are copied, the pool's GBs are not, and the copy sees what is loaded afterwards."""
    geometry = dataclasses.replace(GATED, num_experts=8, hidden_size=48, intermediate_size=40, moe_layers=(0,))
    pool = pool_for(geometry, shared_outer=shared_outer)
    inputs = Case("copied").make()
    module = FusedMoEWithLoRA(inputs.w13, inputs.w2, pool.layer(0))
    module.pool = pool  # type: ignore[assignment]
    twin = copy.deepcopy(module)
    assert twin.w13 is not module.w13 and twin.lora is module.lora is pool.layer(0) and twin.pool is pool
    assert dataclasses.replace(module.lora).lora_a2 is pool.layer(0).lora_a2
    before = run(twin, inputs)
    for slot in range(3):
        pool.load(shared_adapter(geometry, 4, seed=slot), slot)
    assert_bitwise(run(twin, inputs), run(module, inputs))
    assert not torch.equal(run(twin, inputs), before)
    assert_close(run(twin, inputs, adapters=False), exact_experts(inputs, adapters=False), TOLERANCES[torch.float32])
