"""The op that a rewrite puts for delta and activation: CPU kernel, and the Triton kernels under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops import reference
from moelora_ops.kernels.triton import delta, delta_activation
from moelora_ops.ops.fused_moe_lora_activation import OP
from moelora_ops.testing.cases import CASES, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, upcast

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
NAMES = ("empty", "one-token", "no-adapter", "no-slot", "rank-8-in-64", "rank-0-slot", "stray-ids", "disabled-slot", "strided")
TINY = Case("tiny", num_tokens=5, num_experts=3, hidden_size=24, intermediate_size=20, max_loras=2, ranks=(3, 16))


class Call:
    """The first projection of a case, base and all, and its activation."""

    def __init__(self, inputs: Inputs, *, activation: str = "silu", weighted: bool = False, block_size: int = 4) -> None:
        case, generator = inputs.case, torch.Generator().manual_seed(1)
        a, b = inputs.gate_up_lora()
        x = torch.randn(case.num_tokens, case.hidden_size, generator=generator).to(case.dtype)
        batch = (case.num_tokens, case.top_k, case.num_slices * case.intermediate_size)
        self.base = torch.randn(batch, generator=generator).to(case.dtype)
        args, kwargs = inputs.align(block_size)
        table = reference.moe_lora_align_block_size(*args, **kwargs)
        self.args = (x, a, b, inputs.topk_weights, *table)
        self.kwargs: dict[str, Any] = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted)
        self.activation, self.gated = activation, case.gated

    def exact(self, *, adapters: bool = True) -> Tensor:
        output = self.base.double()
        if adapters:
            reference.fused_moe_lora(output, *upcast(self.args), **self.kwargs)
        return reference.activate(output, self.activation, gated=self.gated, interleaved=False, alpha=0.0, limit=None)

    def check(self, op: Any, clean: Call | None = None) -> None:
        """Relative to what the adapters change."""
        before = self.base.clone()
        got, want, plain = op(self.base, *self.args, **self.kwargs, activation=self.activation), *self.both(clean or self)
        touched = (want - plain).ne(0).any(-1)
        assert_close(got[~touched], plain[~touched], TOLERANCES[self.base.dtype], what="rows without adapter")
        if touched.any():
            assert_close(got[touched], want[touched], TOLERANCES[self.base.dtype], scale=(want - plain)[touched])
        assert_bitwise(self.base, before, "the base is not written")

    @staticmethod
    def both(call: Call) -> tuple[Tensor, Tensor]:
        return call.exact(), call.exact(adapters=False)


@pytest.fixture
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    new_z = delta.new_z
    monkeypatch.setattr(delta, "new_z", lambda *args: new_z(*args).fill_(torch.nan))


@interpreted
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved and str(c) in NAMES], ids=str)
def test_expands_and_activates_every_row(case: Case, poisoned_scratch: None) -> None:
    """The formula for each case: rows without an adapter too, with NaN wherever no result may look."""
    inputs, activation = case.make(), "silu" if case.activation == "swigluoai" else case.activation
    weighted = case.num_tokens % 2 == 0
    clean = Call(inputs, activation=activation, weighted=weighted)
    Call(inputs.poisoned(), activation=activation, weighted=weighted).check(delta_activation.fused_moe_lora_activation, clean)


@interpreted
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(activation: str, gated: bool) -> None:
    """Each activation, gated and not."""
    call = Call(TINY.like(gated=gated).make(), activation=activation)
    call.check(delta_activation.fused_moe_lora_activation)
    call.check(OP)


@interpreted
@pytest.mark.parametrize("rank, block_size", [(80, 1), (1, 24), (16, 64)])
def test_ranks_and_block_sizes(rank: int, block_size: int, poisoned_scratch: None) -> None:
    """Ranks of more than one step, tiles of several blocks and blocks of several tiles."""
    inputs = TINY.like(num_tokens=9, max_lora_rank=rank, ranks=()).make()
    Call(inputs, block_size=block_size).check(delta_activation.fused_moe_lora_activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cpu_kernel(dtype: torch.dtype) -> None:
    """The op on CPU tensors."""
    Call(TINY.like(num_tokens=40, dtype=dtype).make(), weighted=True).check(OP)


def test_opcheck() -> None:
    """Schema, fake, autograd registration and a trace with dynamic sizes agree with the kernel."""
    call = Call(TINY.make())
    torch.library.opcheck(OP, (call.base, *call.args), {**call.kwargs, "activation": "gelu"})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(activation="swigluoai"), "without parameters"),
        (dict(activation="tanh"), "activation must be one of"),
        (dict(base=torch.zeros(5, 2, 41)), r"base_output dim 2 must be S \* N = 40, got 41"),
        (dict(slices=3), "2 slices"),
    ],
)  # fmt: skip
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    """What the op cannot serve raises with the argument's name."""
    call = Call(TINY.make())
    x, a, b, *rest = call.args
    if "slices" in change:
        a, b = [*a, a[0]], [*b, b[0]]
        change = dict(base=torch.zeros(5, 2, 60))
    with pytest.raises(ValueError, match=message):
        OP(change.get("base", call.base), x, a, b, *rest, activation=change.get("activation", "silu"))


@interpreted
def test_places_of_another_batch_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch where a batch full of adapters left its places, and scratch of every other kind, before one with few of them."""
    case = TINY.like(num_tokens=9, adapters="mixed")
    full, few = case.like(adapters="uniform").make(), case.make()
    few.token_lora_mapping[1:] = -1
    places = torch.empty(case.num_pairs, dtype=torch.int64)
    monkeypatch.setattr(delta_activation, "_PLANS", {})
    monkeypatch.setattr(delta_activation.Plan, "_places", staticmethod(lambda like, num_pairs: places[:num_pairs]))
    Call(full).check(delta_activation.fused_moe_lora_activation)
    kept = places.clone()
    assert (kept >= 0).all()
    call = Call(few)
    ids, padded = call.args[4], call.args[6]
    unused = torch.arange(ids.shape[1])[None, :] >= padded[:, None]
    places_past = unused.flatten().nonzero()[: case.num_pairs, 0]
    ids.view(-1)[places_past] = torch.arange(case.num_pairs, dtype=ids.dtype)  # what is past the padding is anything
    constants = (torch.full_like(kept, n) for n in (-(2**62), -1, 0, ids.numel() - 1, ids.numel(), 2**62))
    for content in (kept, kept.flip(0), places_past, *constants):
        places.copy_(content)
        call.check(delta_activation.fused_moe_lora_activation)
