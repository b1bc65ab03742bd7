"""Whole MoE models under torch.compile: one graph for all batches and adapters, no break, no copy, the values of fp64.

The decoder is computed in two ways: with the layer op, and as an engine does it, with base GEMMs of its own, one alignment and
two deltas. Each way is compiled once by Inductor, and most tests here look at that one compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes_config

from moelora_ops import FusedMoEWithLoRA, MoeRunner, fused_moe_lora, token_lora_mapping
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.compiles import Counted, Generated, graph_breaks, unbacked
from moelora_ops.testing.decoder import WAYS, Decoder, DecoderSizes, EngineExperts, exact_twin, step_inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close

SIZES = DecoderSizes(num_rows=8192)
BATCHES = (7, 1, 2, 3, 8, 31, 100, 513, 8192)
RANKS = (8, 3, 5)


class Served:
    """A decoder, its pool with an adapter in each slot, and its fp64 twin, which follows every step."""

    def __init__(self, way: str) -> None:
        self.way, self.pool = way, SIZES.pool()
        for slot, rank in enumerate(RANKS):
            self.load(slot, rank, seed=slot)
        self.model, self.twin = Decoder(SIZES, self.pool, WAYS[way]), exact_twin(SIZES, self.pool)

    def load(self, slot: int, rank: int, *, seed: int) -> None:
        self.pool.load(random_adapter(SIZES.geometry, rank, seed=seed), slot)

    def check(self, function: Any, args: tuple[Tensor, ...]) -> Tensor:
        """A step by `function`, compared with the twin's."""
        logits, ids = function(*args)
        want, _ = self.twin(*args, given_ids=ids)
        assert_close(logits, want, TOLERANCES[torch.float32], what=f"{self.way}, T = {len(args[0])}")
        return logits


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of two test processes on two cores wait for each other longer than tiny models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def unbacked_inputs(num_tokens: int, *, seed: int = 0) -> tuple[Tensor, ...]:
    args = step_inputs(SIZES, num_tokens, seed=seed)
    unbacked(*args)
    return args


@pytest.fixture(scope="module", params=WAYS)
def compiled(request: Any) -> Iterator[tuple[Served, Counted, Generated]]:
    torch._dynamo.reset()
    served = Served(request.param)
    function = Counted(served.model, backend="inductor")
    generated = Generated.of(served.check, function, unbacked_inputs(9))
    yield served, function, generated
    torch._dynamo.reset()


def test_one_compile_for_all_batches(compiled: Any) -> None:
    """T = 1 to 8192 with an unbacked batch: the whole model is one graph, compiled once, and right at every size."""
    served, function, _ = compiled
    for num_tokens in BATCHES:
        served.check(function, unbacked_inputs(num_tokens))
    assert function.compiles == 1


def test_adapters_and_mappings_compile_nothing(compiled: Any) -> None:
    """Loads, swaps, other ranks, unloads, switches and the number of adapters in a batch: each is seen, none recompiles."""
    served, function, _ = compiled
    pool, inputs = served.pool, unbacked_inputs(40)
    *others, slots = inputs

    def mapped(slots: Tensor) -> tuple[Tensor, ...]:
        unbacked(slots)
        return (*others, slots)

    seen = [served.check(function, inputs)]
    changes = {
        "another adapter in a slot": lambda: served.load(1, rank=3, seed=11),
        "another rank": lambda: served.load(2, rank=8, seed=12),
        "unloaded": lambda: pool.unload(0),
        "loaded again": lambda: served.load(0, rank=1, seed=13),
        "switched off": lambda: pool.disable(2),
        "switched on": lambda: pool.enable(2),
    }
    for what, change in changes.items():
        change()
        seen.append(served.check(function, inputs))
        assert (seen[-1] - seen[-2]).abs().max() > 0.1, what
    for num_active, mapping in enumerate((torch.full_like(slots, -1), slots.clamp(max=0), slots.clamp(max=1), slots)):
        assert len(mapping.clamp(min=-1).unique()) - 1 == num_active
        served.check(function, mapped(mapping.clone()))
    assert function.compiles == 1


def test_no_copy_of_what_is_written(compiled: Any) -> None:
    """Deltas go into the base GEMMs' own buffers and keys and values into the cache itself: nothing is cloned first."""
    served, _, generated = compiled
    assert generated.missed == 0
    cache = str(tuple(served.model.layers[0].keys.shape))
    assert cache in generated.code and f"empty_strided_cpu({cache}" not in generated.code
    writers = generated.writers("fused_moe_lora")
    assert len(writers) == (2 * SIZES.num_layers if served.way == "engine" else 0)
    assert all(len(kernels) == 1 and "bmm" in kernels[0] for kernels in writers), writers


def test_a_copy_is_noticed() -> None:
    """What the test above looks at tells the output that is a product's own buffer from the one that had to be cloned."""
    layer = SIZES.pool().layer(0)
    aligned = torch.ops.moelora.moe_lora_align_block_size(torch.zeros(4, 2).int(), torch.zeros(4).int(), 6, 16, 3)
    adapter = ([layer.lora_a2], [layer.lora_b2], torch.ones(4, 2), *aligned)

    def twice(h: Tensor, w2: Tensor) -> Tensor:
        base = (h @ w2.T).view(4, 2, -1)
        output = base.clone()
        fused_moe_lora(output, h, *adapter)
        fused_moe_lora(base, h, *adapter)
        return base + output

    generated = Generated.of(torch.compile(twice, fullgraph=True), torch.randn(8, 24), torch.randn(32, 24))
    cloned, own = generated.writers("fused_moe_lora")
    assert generated.missed == 1
    assert "clone" in cloned[0] and "mm" not in cloned[0]
    assert own[0].endswith("mm")


@pytest.mark.parametrize("way", WAYS)
def test_no_graph_break(way: str) -> None:
    """The step is one graph without asking for it by fullgraph; a host read in it is noticed."""
    served, inputs = Served(way), step_inputs(SIZES, 9)
    assert graph_breaks(served.model, *inputs) == []

    def reads_a_slot(*args: Tensor) -> Tensor:
        logits, _ = served.model(*args)
        return logits * (1 if args[-1][0].item() >= 0 else 2)

    assert len(graph_breaks(reads_a_slot, *inputs)) >= 1


@pytest.mark.parametrize("way", WAYS)
def test_marked_dynamic(way: str) -> None:
    """mark_dynamic: one compile from two tokens up, and one more for a batch of one unless sizes are told to be oblivious."""
    for oblivious, most in ((False, 2), (True, 1)):
        torch._dynamo.reset()
        served = Served(way)
        function = Counted(served.model)
        with shapes_config.patch(backed_size_oblivious=oblivious):
            for num_tokens in (7, 2, 513, 1):
                inputs = step_inputs(SIZES, num_tokens)
                for tensor in inputs:
                    torch._dynamo.mark_dynamic(tensor, 0)
                served.check(function, inputs)
                assert function.compiles == (1 if num_tokens > 1 else most)


@pytest.mark.parametrize("way", WAYS)
def test_at_most_two_compiles_unmarked(way: str) -> None:
    """With nothing marked: one token, and then one graph for every other size."""
    torch._dynamo.reset()
    served = Served(way)
    function = Counted(served.model)
    for num_tokens in (1, 2, 3, 100, 8192):
        served.check(function, step_inputs(SIZES, num_tokens))
    assert function.compiles == 2


def test_a_number_in_python_is_counted() -> None:
    """The counter bites: an attribute of the model that is an int compiles once for each value that it takes."""
    torch._dynamo.reset()
    served = Served("fused")

    class Scaled(nn.Module):
        active = 1

        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
            logits, ids = served.model(*args)
            return logits * self.active / self.active, ids

    module = Scaled()
    function = Counted(module, dynamic=False)
    for module.active in (1, 2, 3, 1):
        served.check(function, step_inputs(SIZES, 5))
    assert function.compiles == 3


def test_segments_inside_the_graph() -> None:
    """`token_lora_mapping` in the compiled region: other segments, more of them, and padding past the last compile nothing."""
    torch._dynamo.reset()
    served = Served("fused")

    def step(tokens: Tensor, rows: Tensor, positions: Tensor, seg_indptr: Tensor, lora_ids: Tensor) -> Any:
        slots = token_lora_mapping(seg_indptr, lora_ids, tokens.shape[0])
        return (*served.model(tokens, rows, positions, slots), slots)

    function = Counted(step)
    for num_tokens, ends, adapters in (
        (9, [0, 4, 9], [1, -1]),
        (1, [0, 1, 1], [2, 0]),
        (300, [0, 100, 100, 290], [0, 2, 1]),
        (12, [0, 3, 4, 5, 6, 12], [2, 1, 0, -1, 2]),
    ):
        tokens, rows, positions, _ = unbacked_inputs(num_tokens)
        seg_indptr, lora_ids = torch.tensor(ends), torch.tensor(adapters)
        torch._dynamo.decorators.mark_unbacked(seg_indptr, 0)
        torch._dynamo.decorators.mark_unbacked(lora_ids, 0)
        logits, ids, slots = function(tokens, rows, positions, seg_indptr, lora_ids)
        assert slots.tolist() == token_lora_mapping(seg_indptr, lora_ids, num_tokens).tolist()
        want, _ = served.twin(tokens, rows, positions, slots, given_ids=ids)
        assert_close(logits, want, TOLERANCES[torch.float32], what=f"T = {num_tokens}")
    assert function.compiles == 1


@pytest.mark.parametrize("way", ["weights", "callables"])
def test_switching_lora_off_compiles_once(way: str) -> None:
    """`lora_enabled` is decided in Python: one graph with adapters, one without; going back and forth makes no third.

    Without adapters the graph has no trace of them, and its rows are those of a mapping of -1.
    """
    torch._dynamo.reset()
    served = Served("fused")
    layer, experts = served.pool.layer(0), served.model.layers[0].experts

    def gemm(weight: Tensor) -> Any:
        base = EngineExperts(weight, weight, layer)

        def call(rows: Tensor, topk_ids: Tensor) -> Tensor:
            each = topk_ids.shape[1] if weight is experts.w13 else 1
            return base._gemm(weight, rows.repeat_interleave(each, dim=0), topk_ids)

        return call

    if way == "weights":
        runner: MoeRunner = FusedMoEWithLoRA(experts.w13, experts.w2, layer)
    else:
        runner = MoeRunner(gemm(experts.w13), gemm(experts.w2), num_experts=SIZES.num_experts, lora=layer)
    x, slots = torch.randn(6, 32), torch.tensor([0, 1, 2, -1, 0, 1])
    weights, ids = torch.randn(6, 6).softmax(-1).topk(2)
    function = Counted(runner)
    for enabled in (True, False, True, False):
        runner.lora_enabled = enabled
        out = function(x, weights, ids, slots)
        want = served.twin.layers[0].experts(x, weights, ids, slots if enabled else torch.full_like(slots, -1))
        assert_close(out, want, TOLERANCES[torch.float32], what=f"lora_enabled={enabled}")
    assert function.compiles == 2


def test_the_page_names_tests_that_exist() -> None:
    """Each row of docs/compile.md is counted by a test of that name."""
    root = Path(__file__).resolve().parent.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "compile.md").read_text())
    assert len(named) >= 15
    assert [(file, test) for file, test in named if f"def {test}(" not in (root / file).read_text()] == []
