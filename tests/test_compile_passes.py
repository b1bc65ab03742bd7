"""The Inductor rewrites: each fires on the spellings it is for and on nothing near them, and computes what eager does."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import moelora_ops.compile
from moelora_ops.testing.cases import Case
from moelora_ops.testing.compiles import REWRITTEN
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.passes import (
    ACTIVATIONS, EAGER, LAYERS, NEAR_ACTIVATIONS, NEAR_EAGER, NEAR_LAYERS, Activated, Aligns, Eager, Layer, batch,
)  # fmt: skip

ops = torch.ops.moelora
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def fired(function: Callable[..., Any], *args: Any, names: tuple[str, ...] = ()) -> tuple[dict[str, int], Any]:
    """What fires while a function is compiled, and its result."""
    torch._dynamo.reset()
    with torch.no_grad(), moelora_ops.compile.enable(*names) as rewrites:
        result = torch.compile(function, fullgraph=True, backend=REWRITTEN)(*args)
    return {name: count for name, count in rewrites.fired.items() if count}, result


def check(module: Any, result: Tensor, x: Tensor, mapping: Tensor) -> None:
    """Against the same module in fp64, relative to what its adapters change."""
    exact, none = module.exact(x, mapping), module.exact(x, torch.full_like(mapping, -1))
    scale = exact - none
    assert scale.square().mean() > 1e-3 * exact.square().mean(), "the delta is a part of the result"
    assert_close(result, exact, TOLERANCES[x.dtype], scale=scale, what=str(module))


def nearly(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A delta op whose halves go into something that is nearly an activation."""
    module = Activated("chunk")

    def function(x: Tensor, mapping: Tensor) -> Tensor:
        weights, ids = module.route(x)
        base = module.first_base(x, ids)
        ops.fused_moe_lora(base, x, *module.slices(), weights, *module.align(ids, mapping))
        return change(*base.chunk(2, dim=-1))

    return function


def total(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of gates": lambda gate, up: total(gate) * torch.sigmoid(gate) * up,
    "sigmoid of a sum": lambda gate, up: gate * torch.sigmoid(total(gate)) * up,
    "relu of a sum": lambda gate, up: torch.relu(total(gate)) * torch.relu(gate) * up,
    "tanh of a sum": lambda gate, up: (
        0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * total(gate**3)))) * up
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_in_an_activation_is_none(name: str) -> None:
    """An axis that one factor is summed over and another one has is two indices, not one."""
    function, args = nearly(SUMS[name]), batch(13)
    count, result = fired(function, *args)
    assert count == {}
    assert_close(result, function(*args), TOLERANCES[torch.float32])


def plain_delta(base: Tensor, x: Tensor, a: Tensor, b: Tensor, slot: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    at = (slot[:, None], ids)
    return base, torch.einsum("tkr,tknr->tkn", torch.einsum("th,tkrh->tkr", x, a[at]), b[at])


def by_floats(base: Tensor, x: Tensor, a: Tensor, b: Tensor, mapping: Tensor, ids: Tensor) -> Tensor:
    """Slots cast from floats: of -0.5 the slot is 0, and the mask false."""
    slots = mapping - 0.5
    base, delta = plain_delta(base, x, a, b, slots.int().clamp(min=0), ids)
    return base + delta * (slots >= 0)[:, None, None]


def by_bytes(base: Tensor, x: Tensor, a: Tensor, b: Tensor, mapping: Tensor, ids: Tensor) -> Tensor:
    """Slots of which a cast leaves the last byte."""
    slots = torch.where(mapping < 0, mapping, mapping + 256).to(torch.int8)
    base, delta = plain_delta(base, x, a, b, slots.clamp(min=0).int(), ids)
    return base + delta * (slots >= 0)[:, None, None]


def broadcast_zero(base: Tensor, x: Tensor, a: Tensor, b: Tensor, mapping: Tensor, ids: Tensor) -> Tensor:
    """A `where` that repeats its value because its other branch is larger, and the sum over the copies."""
    base, delta = plain_delta(base, x, a, b, mapping.clamp(min=0), ids)
    return base + torch.where((mapping >= 0)[:, None, None, None], delta[:, None], torch.zeros(1, 5, 1, 1)).sum(1)


def delta_arguments(num_tokens: int = 13) -> tuple[Tensor, ...]:
    module, (x, mapping) = Eager("einsum"), batch(num_tokens)
    _, ids = module.route(x)
    return module.first_base(x, ids), x, module.lora_a1, module.lora_b13, mapping, ids


@pytest.mark.parametrize("function", [by_floats, by_bytes, broadcast_zero])
def test_what_a_cast_or_a_broadcast_changes_is_kept(function: Any) -> None:
    """Whether a rewrite fires or not, the result is eager's."""
    args = delta_arguments()
    _, result = fired(function, *args)
    assert_close(result, function(*args), TOLERANCES[torch.float32])


def test_a_broadcast_delta_of_an_unbacked_batch_is_left_alone() -> None:
    """The delta of one token added to all: the op's checks cannot tell before it runs."""

    def function(*args: Tensor) -> Tensor:
        base, delta = plain_delta(*args)
        return base + delta

    base, x, a, b, mapping, ids = delta_arguments()
    args = (base, x[:1].clone(), a, b, mapping[:1].clamp(min=0), ids[:1].clone())
    torch._dynamo.decorators.mark_unbacked(base, 0)
    count, result = fired(function, *args)
    assert count == {}
    assert_close(result, function(*args), TOLERANCES[torch.float32])


@pytest.mark.parametrize("spelling", EAGER)
def test_eager_lora_fires(spelling: str) -> None:
    """A delta in plain PyTorch, however it is spelled, becomes an alignment and the delta op; -1 keeps its meaning."""
    module = Eager(spelling)
    x, mapping = batch(13)
    count, result = fired(module, x, mapping)
    assert count == {"eager_lora": 1}
    check(module, result, x, mapping)


@pytest.mark.parametrize("spelling", NEAR_EAGER)
def test_eager_lora_leaves_alone(spelling: str) -> None:
    """What is nearly a delta stays, with eager's result."""
    module = Eager(spelling)
    x, mapping = batch(13)
    count, result = fired(module, x, mapping)
    assert count == {}
    assert_close(result, module(x, mapping), TOLERANCES[x.dtype])


def test_what_an_op_refuses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the op's own checks refuse the rewritten call, the graph stays as it was."""
    from moelora_ops.compile import eager_lora

    monkeypatch.setattr(eager_lora, "BLOCK_SIZE", 0)
    module, args = Eager("einsum"), batch(13)
    count, result = fired(module, *args)
    assert count == {}
    assert_close(result, module(*args), TOLERANCES[torch.float32])


@pytest.mark.parametrize("spelling", ACTIVATIONS)
def test_delta_activation_fires(spelling: str) -> None:
    """The delta op and an activation of its whole result become one op."""
    module = Activated(spelling)
    x, mapping = batch(13)
    count, result = fired(module, x, mapping)
    assert count == {"delta_activation": 1}
    check(module, result, x, mapping)


@pytest.mark.parametrize("spelling", NEAR_ACTIVATIONS)
def test_delta_activation_leaves_alone(spelling: str) -> None:
    """Another reader of the sum, another half, another function, an offset: both ops stay."""
    module = Activated(spelling)
    x, mapping = batch(13)
    count, result = fired(module, x, mapping)
    assert count == {}
    assert_close(result, module(x, mapping), TOLERANCES[x.dtype])


@pytest.mark.parametrize("spelling", LAYERS)
def test_expert_layer_fires(spelling: str) -> None:
    """A layer around products that we can serve becomes the layer op."""
    module = Layer(spelling)
    x, mapping = batch(13, dtype=module.dtype)
    count, result = fired(module, x, mapping)
    assert count.pop("shared_align", 0) <= 1 and count == {"expert_layer": 1}
    check(module, result, x, mapping)


@pytest.mark.parametrize("spelling", NEAR_LAYERS)
def test_expert_layer_leaves_alone(spelling: str) -> None:
    """Ids that may be -1, another reader, another weight or other experts: the layer stays in parts."""
    module = Layer(spelling)
    x, mapping = batch(13, dtype=module.dtype)
    count, result = fired(module, x, mapping, names=("expert_layer",))
    assert count == {}
    assert_close(result, module(x, mapping), TOLERANCES[x.dtype])


SAME: dict[str, dict[str, Any]] = {
    "same": {},
    "views": {"mapping": lambda m: m.view(-1, 1).squeeze(1)},
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "block size": {"block": lambda n: 8},
    "slots": {"loras": lambda n: 2},
    "mapping": {"mapping": lambda m: m + 1},
    "enabled": {"enabled": lambda e: torch.zeros(3, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", SAME)
def test_shared_align_fires(name: str) -> None:
    """Equal arguments are aligned once."""
    module, inputs = Aligns(**SAME[name]), Case("ids").make()
    args = inputs.topk_ids.long(), inputs.token_lora_mapping
    count, result = fired(module, *args)
    assert count == {"shared_align": 1}
    assert torch.equal(result, module(*args))


def test_alignments_that_are_returned_stay_apart() -> None:
    """A caller who writes into one of them does not write into the other."""

    def function(ids: Tensor, mapping: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (ops.moe_lora_align_block_size(ids, mapping, 8, 16, 3) for _ in range(2))
        return first[2], second[2].view(-1, 1)

    inputs = Case("ids").make()
    _, (first, second) = fired(function, inputs.topk_ids, inputs.token_lora_mapping)
    first.fill_(-7)
    assert (second >= 0).all()


@pytest.mark.parametrize("name", DIFFERENT)
def test_shared_align_leaves_alone(name: str) -> None:
    """Another block size, number of slots, mapping or set of enabled slots is another alignment."""
    module, inputs = Aligns(**DIFFERENT[name]), Case("ids").make()
    args = inputs.topk_ids.long(), inputs.token_lora_mapping
    count, result = fired(module, *args)
    assert count == {}
    assert torch.equal(result, module(*args))


@pytest.mark.parametrize(
    "module, backend", [(Eager("raw"), "inductor"), (Activated("chunk"), REWRITTEN), (Layer("einsum"), REWRITTEN)], ids=str
)
def test_dynamic_batch(module: Any, backend: Any) -> None:
    """One graph for all batch sizes, rewritten as the static one."""
    with fresh_cache(), torch.no_grad(), moelora_ops.compile.enable() as rewrites:
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        for num_tokens in (13, 6, 40):
            x, mapping = batch(num_tokens)
            for tensor in (x, mapping):
                torch._dynamo.mark_dynamic(tensor, 0)
            check(module, compiled(x, mapping), x, mapping)
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(rewrites.fired.values()) == 1 + rewrites.fired["shared_align"]


@pytest.mark.parametrize("module", [Eager("einsum"), Activated("chunk"), Layer("einsum")], ids=str)
def test_half_precision(module: Any) -> None:
    """bf16, where eager rounds in more places than the ops."""
    x, mapping = batch(40, dtype=torch.bfloat16)
    module = type(module)(module.spelling, dtype=torch.bfloat16)
    count, result = fired(module, x, mapping)
    assert sum(count.values()) - count.get("shared_align", 0) == 1
    check(module, result, x, mapping)
