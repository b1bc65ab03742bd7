"""The public op fused_moe_lora: the delta of both projections on top of anybody's base output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops import reference
from moelora_ops.testing.cases import CASES, Case, Inputs, strided
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact
from moelora_ops.testing.strategies import DTYPES, cases, judged, seeds

align = torch.ops.moelora.moe_lora_align_block_size
fused_moe_lora = torch.ops.moelora.fused_moe_lora
BLOCK_SIZES = (1, 2, 8, 16, 33, 64)


@dataclass
class Delta:
    """One call of the op: `output` is a fresh base result around which NaN stands in the slack columns."""

    output: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    columns: slice

    def run(self, **changes: Any) -> Tensor:
        output = self.output.clone(memory_format=torch.preserve_format) if self.output.is_contiguous() else strided(self.output)
        fused_moe_lora(output, *self.args, **{**self.kwargs, **changes})
        return output

    def exact(self) -> Tensor:
        output = self.output.double()
        exact(reference.fused_moe_lora, ((output, *self.args), self.kwargs))
        return output

    def check(self) -> Tensor:
        """The delta in its columns is the reference's; every other column keeps its bits."""
        got = self.run()
        want, base, inside = self.exact(), self.output, (..., self.columns)
        assert_delta_close(got[inside], base[inside], want[inside], base[inside].double())
        for slack in (slice(0, self.columns.start), slice(self.columns.stop, None)):
            assert_bitwise(got[..., slack], base[..., slack], "columns outside the delta")
        return got


def delta(
    inputs: Inputs, projection: str, *, weighted: bool = False, block_size: int = 8, offset: int = 3, slack: int = 2
) -> Delta:
    """The call for one projection of a case; input rows are signed random, per token or per pair as the projection has them."""
    case, generator = inputs.case, torch.Generator().manual_seed(1)
    (a, b), rows = (inputs.gate_up_lora(), case.num_tokens) if projection == "gate_up" else (inputs.down_lora(), case.num_pairs)
    x = torch.randn(rows, a[0].shape[3], generator=generator).to(case.dtype)
    width = len(b) * b[0].shape[2]
    output = torch.full((case.num_tokens, case.top_k, offset + width + slack), torch.nan, dtype=case.dtype)
    output[..., offset : offset + width] = torch.randn(case.num_tokens, case.top_k, width, generator=generator)
    args, kwargs = inputs.align(block_size)
    aligned = align(*args, **kwargs)
    if case.strided:
        x, output, aligned = strided(x), strided(output), tuple(strided(t) for t in aligned)
    options = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted, offset=offset)
    return Delta(output, (x, a, b, inputs.topk_weights, *aligned), options, slice(offset, offset + width))


PROJECTIONS = pytest.mark.parametrize("projection", ["gate_up", "down"])
any_delta = (cases().map(lambda case: case.like(interleaved=False)), seeds, st.sampled_from(("gate_up", "down")), st.booleans())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@PROJECTIONS
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved], ids=str)
def test_adds_the_delta(case: Case, projection: str, dtype: torch.dtype) -> None:
    """output[t, k, offset + s * N : ...] += B_s (A_s x), for each case and dtype."""
    delta(case.like(dtype=dtype).make(), projection).check()


@given(*any_delta, st.sampled_from(BLOCK_SIZES), st.integers(0, 9), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_adds_the_delta_for_any_arguments(
    case: Case, seed: int, projection: str, weighted: bool, block_size: int, offset: int, slack: int
) -> None:
    """The same for every combination of arguments, layouts and block sizes."""
    inputs = case.make(seed=seed)
    with judged():
        delta(inputs, projection, weighted=weighted, block_size=block_size, offset=offset, slack=slack).check()


@given(*any_delta)
@settings(max_examples=60, deadline=None)
def test_reads_nothing_that_is_not_its_own(case: Case, seed: int, projection: str, weighted: bool) -> None:
    """NaN in unused slots and experts, past each slot's rank, in idle rows and unused weights changes no bit."""
    inputs = case.like(stray_ids=True).make(seed=seed)
    call = delta(inputs, projection, weighted=weighted)
    clean = call.run()
    poisoned = delta(inputs.poisoned(), projection, weighted=weighted)
    live = torch.tensor([slot >= 0 for slot in inputs.slots()], dtype=torch.bool)[:, None]
    valid = live & (torch.tensor(inputs.local_experts()).reshape(case.num_tokens, case.top_k) >= 0)
    rows = valid.flatten() if projection == "down" else valid.any(1)
    x = torch.where(rows[:, None], poisoned.args[0], torch.nan)
    topk_weights = torch.where(valid & weighted, inputs.topk_weights, torch.nan)
    _, a, b, _, *aligned = poisoned.args
    poisoned.args = (strided(x) if case.strided else x, a, b, topk_weights, *aligned)
    assert_bitwise(poisoned.run(), clean)


@given(*any_delta)
@settings(max_examples=25, deadline=None)
def test_same_call_gives_the_same_bits(case: Case, seed: int, projection: str, weighted: bool) -> None:
    """Two calls on the same inputs agree in every bit."""
    call = delta(case.make(seed=seed), projection, weighted=weighted)
    assert_bitwise(call.run(), call.run())


@PROJECTIONS
def test_weighted(projection: str) -> None:
    """mul_routed_weight multiplies each pair's delta by its weight, and changes nothing else."""
    inputs = Case("weighted").make()
    call = delta(inputs, projection, weighted=True)
    call.check()
    assert not torch.equal(call.run()[..., call.columns], call.run(mul_routed_weight=False)[..., call.columns])


@given(*any_delta)
@settings(max_examples=25, deadline=None)
def test_only_the_output_is_written(case: Case, seed: int, projection: str, weighted: bool) -> None:
    """Every input keeps its bits."""
    call = delta(case.make(seed=seed), projection, weighted=weighted)
    x, a, b, *rest = call.args
    tensors = [x, *a, *b, *rest]
    before = [t.clone() for t in tensors]
    call.run()
    for tensor, old in zip(tensors, before):
        assert_bitwise(tensor.contiguous(), old.contiguous())


@PROJECTIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch_mates(dtype: torch.dtype, projection: str) -> None:
    """A token alone gets what it gets in the batch."""
    inputs = Case("mates", dtype=dtype, num_tokens=9, ranks=(16, 3, 8)).make()
    whole, alone = delta(inputs, projection), []
    rows = inputs.case.top_k if projection == "down" else 1
    for t in range(inputs.case.num_tokens):
        names = ("topk_ids", "topk_weights", "token_lora_mapping")
        one = inputs.replace(case=inputs.case.like(num_tokens=1), **{n: getattr(inputs, n)[t : t + 1] for n in names})
        call = delta(one, projection)
        call.output = whole.output[t : t + 1].clone()
        call.args = (whole.args[0][t * rows : (t + 1) * rows], *call.args[1:])
        alone.append(call.run())
    got, batch, base = (t[..., whole.columns] for t in (torch.cat(alone), whole.run(), whole.output))
    assert_delta_close(got, base, batch.double(), base.double())


def test_one_to_three_slices() -> None:
    """q, k, v-like stacks: each slice has its own A and writes its own block of columns."""
    for slices in (1, 2, 3):
        inputs = Case("slices", ranks=(2, 16, 7)).make()
        generator = torch.Generator().manual_seed(slices)
        a = [torch.randn(3, 8, 16, 20, generator=generator) for _ in range(slices)]
        b = [torch.randn(3, 8, 12, 16, generator=generator) for _ in range(slices)]
        call = delta(inputs, "down")
        x, output = torch.randn(13, 20, generator=generator), torch.randn(13, 2, 5 + 12 * slices, generator=generator)
        options = {"offset": 5, "lora_ranks": inputs.lora_ranks}
        Delta(output, (x, a, b, *call.args[3:]), options, slice(5, 5 + 12 * slices)).check()


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("shared_b", [False, True])
def test_shared_experts_dimension(shared_a: bool, shared_b: bool) -> None:
    """An expert dimension of one, or expanded from one, serves all experts, on A, B or both."""
    inputs = Case("shared").make()
    call = delta(inputs, "down")
    x, a, b, *rest = call.args
    a = [t[:, :1] if shared_a else t for t in a]
    b = [t[:, :1] if shared_b else t for t in b]
    call.args = (x, a, b, *rest)
    narrow = call.check()
    call.args = (x, [t.expand(-1, 8, -1, -1) for t in a], [t.expand(-1, 8, -1, -1) for t in b], *rest)
    call.check()
    assert_bitwise(call.run(), narrow, "expanded")


def test_all_slots_expanded_from_one() -> None:
    """A stride of zero over the slots is as good as any."""
    call = delta(Case("expanded").make(), "down")
    x, a, b, *rest = call.args
    call.args = (x, [t[:1].expand_as(t) for t in a], [t[:1].expand_as(t) for t in b], *rest)
    call.check()


def test_output_with_choices_outermost() -> None:
    """The two outer dimensions of the output may have any strides that do not overlap."""
    call = delta(Case("transposed").make(), "gate_up")
    want = call.run()
    got = call.output.transpose(0, 1).contiguous().transpose(0, 1)
    fused_moe_lora(got, *call.args, **call.kwargs)
    assert_bitwise(got.contiguous(), want)


def test_every_slot_alone_adds_up() -> None:
    """The delta of a batch is the deltas of its slots: slots with enabled 0 have none."""
    inputs = Case("split").make()
    call = delta(inputs, "gate_up")
    output = call.output.clone()
    for slot in range(3):
        args, kwargs = inputs.align(8)
        only = torch.arange(3) == slot
        fused_moe_lora(output, *call.args[:4], *align(*args, **{**kwargs, "adapter_enabled": only}), **call.kwargs)
    assert_bitwise(output, call.run())


def test_ranks_are_clamped() -> None:
    """A rank above R is R, below 0 it is 0."""
    call = delta(Case("clamped").make(), "down")
    clamped = call.run(lora_ranks=torch.tensor([16, 0, 5], dtype=torch.int32))
    assert_bitwise(call.run(lora_ranks=torch.tensor([2**31 - 1, -3, 5], dtype=torch.int32)), clamped)


def test_junk_in_the_alignment_is_no_pair_and_no_expert() -> None:
    """Pair ids outside [0, P) are padding, experts outside [0, E) have no delta, lengths outside [0, EM] are clamped."""
    call = delta(Case("junk", adapters="one").make(), "down")
    x, a, b, weights, sorted_token_ids, expert_ids, lengths = call.args
    good = call.run()
    padding = sorted_token_ids == 26
    junk = torch.tensor([-1, -(2**31), 27, 2**31 - 1], dtype=torch.int32)[torch.arange(padding.numel()).view(padding.shape) % 4]
    call.args = (x, a, b, weights, torch.where(padding, junk, sorted_token_ids), expert_ids, lengths)
    assert_bitwise(call.run(), good, "junk pairs")
    call.args = (x, a, b, weights, sorted_token_ids, torch.where(expert_ids < 0, 8, expert_ids), lengths)
    assert_bitwise(call.run(), good, "an expert past the last block")
    call.args = (x, a, b, weights, sorted_token_ids, expert_ids, torch.where(lengths > 0, 2**31 - 1, -5).int())
    assert_bitwise(call.run(), good, "junk lengths")
    for expert in (-1, -9, 8, 2**31 - 1):
        call.args = (x, a, b, weights, sorted_token_ids, torch.full_like(expert_ids, expert), lengths)
        assert_bitwise(call.run(), call.output, f"expert {expert}")


def test_order_of_the_alignment_is_free() -> None:
    """Blocks in any order and pairs in any order inside a block give the same result in the same rows."""
    inputs = Case("permuted", num_tokens=20, adapters="uniform").make()
    call = delta(inputs, "gate_up")
    x, a, b, weights, sorted_token_ids, expert_ids, lengths = call.args
    blocks = sorted_token_ids.view(3, -1, 8).clone()
    experts = expert_ids.clone()
    for slot, length in enumerate(lengths.tolist()):
        order = torch.arange(length // 8).flip(0)
        blocks[slot, : len(order)] = blocks[slot, order].flip(-1)
        experts[slot, : len(order)] = experts[slot, order]
    call.args = (x, a, b, weights, blocks.view_as(sorted_token_ids), experts, lengths)
    call.check()


def test_views_of_a_wider_pool() -> None:
    """Slices of a larger pool (a smaller rank, fewer slots, some experts) are read in place."""
    inputs = Case("pool", max_lora_rank=32, max_loras=5, num_experts=10, adapters="uniform").make()
    a, b = inputs.lora_a2[1:4, 2:10, :8], inputs.lora_b2[1:4, 2:10, :, :8]
    call = delta(Case("view", max_loras=3, num_experts=8, max_lora_rank=8).make(), "down")
    call.args = (call.args[0], [a], [b], *call.args[3:])
    call.check()
