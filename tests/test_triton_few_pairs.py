"""Few pairs: the second shrink as sums of gate_up (`Experts.fuse_shrink2`) and as a kernel of its own, under the interpreter.

Every call runs on scratch full of NaN, with NaN wherever no result may look.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops.kernels import config
from moelora_ops.kernels.triton import experts
from moelora_ops.testing.cases import Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")

GEMM, SHRINK = config.Gemm(16, 16, 32, 4, 1, expand_stages=1), config.Shrink(16, 1, 4, 1)
DIRECT = config.Experts(GEMM, GEMM, SHRINK, SHRINK, segment_m=16, combine_n=32, direct=True)
# I is no multiple of a tile: 7 sums over 16 columns.
RAGGED = Case("ragged", num_tokens=5, num_experts=2, hidden_size=40, intermediate_size=102, max_loras=3, ranks=(8, 16, 3))
CASES = [
    RAGGED.like(stray_ids=True, strided=True),
    RAGGED.like("ranks", num_tokens=4, max_lora_rank=80, ranks=(80, 48, 8), adapters="distinct", bias=True, shared_outer=True),
    RAGGED.like("slots", num_experts=1, top_k=1, num_tokens=7, max_loras=4, ranks=(8, 16, 3, 0), adapters="distinct"),
    RAGGED.like("plain", num_tokens=3, gated=False, activation="relu2", disabled=(1,), num_global_experts=4),
]


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised floats are NaN."""
    allocate = Tensor.new_empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    yield


def run(inputs: Inputs, fuse: bool = True, adapters: bool = True) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    call = experts.prepare(*args, **kwargs)
    plan = experts.make_plan(call, dataclasses.replace(DIRECT, fuse_shrink2=fuse))
    if adapters:
        assert (getattr(plan, "shrink2") is None) == (fuse or inputs.lora_a2 is None)
    return plan.run(call)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_delta_matches_the_reference(case: Case, fuse: bool) -> None:
    """Ragged sizes, several ranks, a shared A2, several steps of rank tiles; NaN in unused slots and past the ranks."""
    inputs = case.make()
    poisoned = inputs.poisoned()
    base, want_base = run(poisoned, fuse, False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, TOLERANCES[case.dtype], what="base")
    assert_delta_close(run(poisoned, fuse), base, exact_experts(inputs), want_base)


def test_one_a2_for_all_experts() -> None:
    """An expert dimension of 1."""
    inputs = RAGGED.make()
    shared = inputs.replace(lora_a2=inputs.lora_a2[:, :1].contiguous())
    expanded = inputs.replace(lora_a2=inputs.lora_a2[:, :1].repeat(1, RAGGED.num_experts, 1, 1))
    assert_bitwise(run(shared, True), run(expanded, True))


def test_half_precision_rounds_act_as_the_shrink_reads_it() -> None:
    """fp16: the delta within the tolerance, and next to no difference between the two ways."""
    inputs = RAGGED.like(dtype=torch.float16).make()
    base, want_base = run(inputs, True, False), exact_experts(inputs, adapters=False)
    fused, apart = run(inputs, True), run(inputs, False)
    assert_delta_close(fused, base, exact_experts(inputs), want_base)
    assert (fused != apart).float().mean() < 0.1


@pytest.mark.parametrize("poison", [("lora_a2",), ("lora_a2", "lora_b2"), ("lora_a13", "lora_b13")], ids="-".join)
def test_nan_stays_with_its_adapter(poison: tuple[str, ...]) -> None:
    """With an adapter of NaN and infinity, rows of others and of none are as without it."""
    inputs = RAGGED.like(dtype=torch.float16).make()
    slots = torch.tensor([-1, 0, 1, 2, 0])
    inputs = inputs.replace(token_lora_mapping=slots.to(inputs.token_lora_mapping.dtype))
    clean, base = run(inputs), run(inputs, adapters=False)
    for tensor, value in zip(poison, (torch.nan, torch.inf)):
        getattr(inputs, tensor)[0] = value
    got = run(inputs)
    assert_bitwise(got[slots == -1], base[slots == -1], "base rows")
    assert_bitwise(got[slots > 0], clean[slots > 0], "rows of other adapters")
    assert not got[slots == 0].isfinite().all(1).any()


def test_adapters_on_the_second_projection_alone() -> None:
    """gate_up has no adapters of its own then, and sums the second shrink all the same."""
    inputs = RAGGED.make().replace(lora_a13=None, lora_b13=None)
    base, want_base = run(inputs, True, False), exact_experts(inputs, adapters=False)
    assert_delta_close(run(inputs, True), base, exact_experts(inputs), want_base)


def test_nobody_and_ids_out_of_range() -> None:
    """All -1, slots past the pool, ranks of 0: the bits of the base."""
    inputs = RAGGED.make()
    base = run(inputs, True, False)
    for slot in (-1, 3):
        nobody = torch.full_like(inputs.token_lora_mapping, slot)
        assert_bitwise(run(inputs.replace(token_lora_mapping=nobody), True), base, f"slot {slot}")
    assert_bitwise(run(inputs.replace(lora_ranks=torch.zeros(3, dtype=torch.int32)), True), base, "rank 0")
