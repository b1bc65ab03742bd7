"""The compiled CPU kernels: every instruction set, sizes around tiles and blocks, and results that no scheduling changes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops import reference
from moelora_ops.kernels import native
from moelora_ops.testing.cases import Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import WeakSignal, assert_bitwise, assert_delta_close, exact, exact_experts
from moelora_ops.testing.strategies import DTYPES, cases, judged, seeds

pytestmark = pytest.mark.skipif(native.CPU_MISSING != "", reason=f"the compiled CPU kernels are {native.CPU_MISSING}")

CAPABILITY = "MOELORA_CPU_CAPABILITY"
BOUND = os.environ.get(CAPABILITY, "")  # set in the child processes of test_each_instruction_set
EXAMPLES = 15 if BOUND else 50


def experts(inputs: Inputs, *, adapters: bool = True) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    result: Tensor = native.op("fused_experts_lora", "cpu")(*args, **kwargs)
    return result


def aligned(inputs: Inputs, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    args, kwargs = inputs.align(block_size)
    result: tuple[Tensor, Tensor, Tensor] = native.op("moe_lora_align_block_size", "cpu")(*args, **kwargs)
    return result


def delta_call(inputs: Inputs, projection: str, block_size: int, weighted: bool) -> tuple[Tensor, tuple, dict]:
    """(base output, arguments after it, keywords) of fused_moe_lora for one projection; three columns of slack on each side."""
    case, generator = inputs.case, torch.Generator().manual_seed(7)
    (a, b), rows = (inputs.gate_up_lora(), case.num_tokens) if projection == "gate_up" else (inputs.down_lora(), case.num_pairs)
    x = torch.randn(rows, a[0].shape[3], generator=generator).to(case.dtype)
    output = torch.randn(case.num_tokens, case.top_k, 6 + len(b) * b[0].shape[2], generator=generator).to(case.dtype)
    keywords = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted, offset=3)
    return output, (x, a, b, inputs.topk_weights, *aligned(inputs, block_size)), keywords


def add_delta(output: Tensor, args: tuple, keywords: dict) -> Tensor:
    result = output.clone()
    native.op("fused_moe_lora", "cpu")(result, *args, **keywords)
    return result


def check_experts(inputs: Inputs) -> None:
    base, want_base = experts(inputs, adapters=False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, TOLERANCES[inputs.case.dtype], what="base")
    assert_delta_close(experts(inputs), base, exact_experts(inputs), want_base)


def check_delta(inputs: Inputs, projection: str, block_size: int = 8, weighted: bool = True) -> None:
    output, args, keywords = delta_call(inputs, projection, block_size, weighted)
    want = output.double()
    exact(reference.fused_moe_lora, ((want, *args), keywords))
    assert_delta_close(add_delta(output, args, keywords), output, want, output.double())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@given(cases(), seeds)
@settings(max_examples=EXAMPLES, deadline=None)
def test_layer_matches_the_reference(case: Case, seed: int) -> None:
    """fused_experts_lora is the formula, with NaN wherever it must not look."""
    with judged():
        check_experts(case.make(seed=seed))
    inputs = case.make(seed=seed)
    assert_bitwise(experts(inputs.poisoned()), experts(inputs), "poisoned")


@given(cases(), seeds, st.sampled_from(("gate_up", "down")), st.sampled_from((1, 8, 33)), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_delta_matches_the_reference(case: Case, seed: int, projection: str, block_size: int, weighted: bool) -> None:
    """fused_moe_lora adds the formula's delta and leaves every other element alone."""
    with judged():
        check_delta(case.like(interleaved=False).make(seed=seed), projection, block_size, weighted)


@given(cases(), seeds, st.sampled_from((1, 3, 16, 64)))
@settings(max_examples=EXAMPLES, deadline=None)
def test_align_is_bitwise_the_reference(case: Case, seed: int, block_size: int) -> None:
    """Every element of the three outputs of moe_lora_align_block_size."""
    inputs = case.make(seed=seed)
    args, kwargs = inputs.align(block_size)
    for got, want in zip(aligned(inputs, block_size), reference.moe_lora_align_block_size(*args, **kwargs)):
        assert_bitwise(got, want)


@pytest.mark.parametrize("num_experts, max_loras", [(1025, 1), (129, 64), (20000, 1), (1, 20000)])
def test_align_has_no_limit_on_groups(num_experts: int, max_loras: int) -> None:
    """More experts, slots or both than any bucket limit seen in the field."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts + 1, (50, 1), generator=generator, dtype=torch.int32)
    mapping = torch.randint(-1, max_loras + 1, (50,), generator=generator)
    args = (ids, mapping, num_experts, 16, max_loras)
    for got, want in zip(native.op("moe_lora_align_block_size", "cpu")(*args), reference.moe_lora_align_block_size(*args)):
        assert_bitwise(got, want)


# Rows around the register tiles (1..6) and the row block (96), columns around 3, 4, 32, 64 and 128, depths around the lanes
# (4, 8, 16) and the depth block (1024), ranks around the lanes and the rank block (64).
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "num_tokens, hidden_size, intermediate_size, rank",
    [(1, 24, 3, 1), (5, 15, 3, 3), (7, 17, 31, 15), (11, 1024, 33, 16), (13, 1025, 65, 17), (96, 31, 5, 63), (97, 63, 7, 65),
     (203, 129, 36, 8), (6, 2049, 16, 130)],
)  # fmt: skip
def test_sizes_around_tiles_and_blocks(
    num_tokens: int, hidden_size: int, intermediate_size: int, rank: int, dtype: torch.dtype
) -> None:
    """Sizes one below, at and one above every internal boundary; one expert takes all rows."""
    case = Case("sizes", num_tokens, num_experts=2, top_k=1, experts="one", adapters="one", max_loras=2, dtype=dtype)
    case = case.like(hidden_size=hidden_size, intermediate_size=intermediate_size, max_lora_rank=rank, bias=True)
    for seed in range(20):  # one token at rank 1 may draw a delta that drowns in the base; draws differ between torch versions
        inputs = case.make(seed=seed)
        with suppress(WeakSignal):
            check_experts(inputs)
            check_delta(inputs, "gate_up")
            check_delta(inputs, "down")
            assert_bitwise(experts(inputs.poisoned()), experts(inputs), "poisoned")
            return
    pytest.fail("no seed gives a delta that can be judged")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(adapters: bool, dtype: torch.dtype) -> None:
    """Stronger than the contract: an output element is summed in an order that depends on depth and rank alone."""
    case = Case("mates", num_tokens=120, num_experts=3, top_k=2, hidden_size=1050, intermediate_size=70, ranks=(16, 3, 8))
    inputs = case.like(dtype=dtype).make()
    whole = experts(inputs, adapters=adapters)
    for first, last in ((0, 1), (1, 2), (50, 55), (7, 119), (119, 120)):
        names = ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping")
        part = inputs.replace(**{name: getattr(inputs, name)[first:last] for name in names})
        assert_bitwise(experts(part, adapters=adapters), whole[first:last], f"rows {first}..{last}")


@given(cases(), seeds)
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_threads_and_repetition_change_no_bit(case: Case, seed: int) -> None:
    """One thread, two threads and the same call again agree in every bit, for all ops."""
    inputs = case.like(interleaved=False, num_tokens=max(4, case.num_tokens)).make(seed=seed)

    def everything() -> list[Tensor]:
        return [experts(inputs), add_delta(*delta_call(inputs, "gate_up", 8, True)), *aligned(inputs, 16)]

    with threads(1):
        alone = everything()
    with threads(2):
        for got, again, want in zip(everything(), everything(), alone):
            assert_bitwise(got, want, "two threads")
            assert_bitwise(again, want, "again")


@given(cases(), seeds)
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_rows_without_adapter_have_the_bits_of_the_base(case: Case, seed: int) -> None:
    """In a mixed batch, with all -1, and with every slot disabled (int32 or bool)."""
    inputs = case.make(seed=seed)
    base = experts(inputs, adapters=False)
    bare = torch.tensor([slot < 0 for slot in inputs.slots()], dtype=torch.bool)
    assert_bitwise(experts(inputs)[bare], base[bare], "mixed batch")
    assert_bitwise(experts(inputs.replace(token_lora_mapping=torch.full_like(inputs.token_lora_mapping, -1))), base, "all -1")
    for flags in (torch.int32, torch.bool):
        disabled = inputs.replace(adapter_enabled=torch.zeros(case.max_loras, dtype=flags))
        assert_bitwise(experts(disabled), base, f"disabled by {flags}")


def test_expanded_tensors_are_read_in_place() -> None:
    """Stride 0 over slots, experts or rows means what the repeated tensor means."""
    inputs = Case("expanded", bias=True).make()
    names = ("w13", "w2", "w13_bias", "w2_bias", "lora_a13", "lora_b13", "lora_a2", "lora_b2", "hidden_states", "topk_weights")
    expanded = inputs.replace(**{name: getattr(inputs, name)[:1].expand_as(getattr(inputs, name)) for name in names})
    repeated = inputs.replace(**{name: getattr(expanded, name).contiguous() for name in names})
    assert_bitwise(experts(expanded), experts(repeated))
    check_experts(expanded)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
def test_activations_over_their_whole_range(activation: str) -> None:
    """Each activation is right to fp32 accuracy from -90 to 90, relative to the value itself, and 0 far below."""
    gate = torch.cat([torch.linspace(-90, 90, 701), torch.linspace(-4, 4, 500), torch.tensor([-1e4, -1e20, -3e38])])
    eye = torch.eye(1).expand(1, 1, 1)
    args = (gate[:, None], torch.ones(1, 2, 1), eye, torch.ones(len(gate), 1), torch.zeros(len(gate), 1, dtype=torch.int64))
    call = (args + (torch.full((len(gate),), -1), None, None, None, None), {"activation": activation})
    got, want = native.op("fused_experts_lora", "cpu")(*call[0], **call[1]), exact(reference.fused_experts_lora, call)
    # Rounding the argument of exp to fp32 costs |x| ulp; gelu = x/2 (1 + erf) cancels for x < 0 in any fp32 code; exp saturates
    # at e^-88.3, which leaves errors of at most 1e-34.
    allowed = 1e-6 + 2e-7 * gate.abs()[:, None]
    slack = 1e-6 * gate.square()[:, None] if activation in ("gelu", "gelu_tanh") else 0.0
    error = ((got.double() - want).abs() - slack).clamp(min=0) / want.abs().clamp(min=1e-28)
    worst = (error / allowed).argmax()
    assert (error <= allowed).all(), f"x = {gate[worst].item()}: relative error {error[worst].item():.1e}"


CAPABILITIES = ("default", "avx2", "avx512", "avx512_bf16")
CHILD = """
import torch
from moelora_ops.kernels import native
from moelora_ops.testing.cases import Case
args, kwargs = Case("digest", hidden_size=1000, dtype=torch.bfloat16).make().experts()
print(native.op("fused_experts_lora", "cpu")(*args, **kwargs).view(torch.int16).tolist())
"""


def run_child(capability: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, CAPABILITY: capability}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


def digest(capability: str) -> str:
    """What a child bound to `capability` computes, to the last bit."""
    done = run_child(capability, "-c", CHILD)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(BOUND != "", reason="runs in the parent only")
def test_each_instruction_set() -> None:
    """The properties above hold for each lesser set this machine runs; each sums in its own order, so bits tell them apart."""
    digests = [digest(capability) for capability in CAPABILITIES]
    for capability, mine, best in zip(CAPABILITIES, digests, digests[1:]):
        if mine == best:  # the better set is not here: the bound made no difference
            continue
        chosen = ("-k", "reference or sizes or alone", __file__)
        done = run_child(capability, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
        assert done.returncode == 0, f"{capability}: {done.stdout[-4000:]}"
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert len(set(digests[:3])) == 3


@pytest.mark.skipif(BOUND != "", reason="runs in the parent only")
def test_an_unknown_instruction_set_is_an_error() -> None:
    """A misspelt bound is not silently ignored."""
    wrong = run_child("sse9", "-c", CHILD)
    want = "MOELORA_CPU_CAPABILITY must be default, avx2, avx512 or avx512_bf16, got 'sse9'"
    assert wrong.returncode != 0 and want in wrong.stderr
