"""The delta op on the GPU: values at real sizes, addresses past 2^31 elements, CUDA graphs, exactness."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

import moelora_ops
from moelora_ops import reference
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact

QWEN = MODELS["qwen3-30b-a3b"]
PROJECTIONS = pytest.mark.parametrize("projection", ["gate_up", "down"])
OFFSET, SLACK = 16, 8  # columns of the output before and after the delta: NaN


class Call:
    """One projection of a case: align and delta on an output whose surplus columns are NaN."""

    def __init__(self, inputs: Inputs, projection: str, *, block_size: int = 16, weighted: bool = False) -> None:
        case, generator = inputs.case, torch.Generator("cuda").manual_seed(1)
        a, b = inputs.gate_up_lora() if projection == "gate_up" else inputs.down_lora()
        rows = case.num_tokens if projection == "gate_up" else case.num_pairs
        width = len(b) * b[0].shape[2]
        self.inputs, self.block_size, self.columns = inputs, block_size, slice(OFFSET, OFFSET + width)
        self.x = torch.randn(rows, a[0].shape[3], generator=generator, device="cuda").to(case.dtype)
        batch = (case.num_tokens, case.top_k)
        self.output = torch.full((*batch, OFFSET + width + SLACK), torch.nan, device="cuda", dtype=case.dtype)
        self.output[..., self.columns] = torch.randn(*batch, width, generator=generator, device="cuda")
        self.lora = (a, b)
        self.weights = inputs.topk_weights * case.top_k  # about 1, so that a weighted delta is as large as the base
        self.kwargs: dict[str, Any] = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted, offset=OFFSET)

    def run(self) -> Tensor:
        args, kwargs = self.inputs.align(self.block_size)
        table = moelora_ops.moe_lora_align_block_size(*args, **kwargs)
        output = self.output.clone()
        moelora_ops.fused_moe_lora(output, self.x, *self.lora, self.weights, *table, **self.kwargs)
        return output

    def exact(self) -> Tensor:
        args, kwargs = self.inputs.align(self.block_size)
        table, output = reference.moe_lora_align_block_size(*args, **kwargs), self.output.double()
        exact(reference.fused_moe_lora, ((output, self.x, *self.lora, self.weights, *table), self.kwargs))
        return output

    def check(self, clean: Call | None = None) -> None:
        got, want, inside = self.run(), (clean or self).exact(), (..., self.columns)
        assert_delta_close(got[inside], self.output[inside], want[inside], self.output[inside].double())
        for slack in (slice(0, OFFSET), slice(self.columns.stop, None)):
            assert_bitwise(got[..., slack], self.output[..., slack], "columns outside the delta")


@PROJECTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved], ids=str)
def test_every_case(case: Case, dtype: torch.dtype, projection: str) -> None:
    """The formula for each case and dtype, with NaN in unused slots and rank padding; nothing else changes a bit."""
    inputs, weighted = case.like(dtype=dtype).make("cuda"), projection == "down"
    Call(inputs.poisoned(), projection, weighted=weighted).check(Call(inputs, projection, weighted=weighted))


@PROJECTIONS
@pytest.mark.parametrize("num_tokens", [1, 7, 32, 128, 512, 2048, 4096])
def test_qwen(num_tokens: int, projection: str) -> None:
    """Qwen3-30B-A3B with 8 adapters of rank 16, at every batch size that chooses other tiles."""
    inputs = QWEN.like(num_tokens=num_tokens, adapters="mixed").make("cuda")
    Call(inputs, projection, block_size=16 if num_tokens <= 128 else 64, weighted=True).check()


@PROJECTIONS
@pytest.mark.parametrize("block_size", [1, 8, 24, 64, 128, 256])
def test_block_sizes(block_size: int, projection: str) -> None:
    """Any block size of the alignment."""
    Call(QWEN.like(num_tokens=200, num_experts=8, top_k=2).make("cuda"), projection, block_size=block_size).check()


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 20, 24, 48, 96, 128, 160, 256])
def test_ranks(rank: int) -> None:
    """Any rank of the pool, one adapter of the full rank and one of a lower."""
    case = QWEN.like(num_tokens=40, num_experts=16, top_k=4, max_loras=2, max_lora_rank=rank, ranks=(rank, max(rank // 2, 1)))
    Call(case.make("cuda").poisoned(), "gate_up").check(Call(case.make("cuda"), "gate_up"))


def test_past_int32(far: Callable[[Tensor], Tensor]) -> None:
    """Input, adapters and output in strides that lead past 2^31 elements."""
    inputs = QWEN.like(num_tokens=6, num_experts=4, top_k=2, hidden_size=512, max_loras=2).make("cuda")
    call = Call(inputs, "down")
    want, ((a,), (b,)) = call.run(), call.lora
    for lora in (([far(a)], [b]), ([a], [far(b)])):
        call.lora = lora
        assert_bitwise(call.run(), want)
    call.lora, call.x = ([a], [b]), far(call.x)
    assert_bitwise(call.run(), want)
    args, kwargs = inputs.align(16)
    output = far(call.output)
    table = moelora_ops.moe_lora_align_block_size(*args, **kwargs)
    moelora_ops.fused_moe_lora(output, call.x, *call.lora, call.weights, *table, **call.kwargs)
    assert_bitwise(output, want)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 64])
def test_graph_replay_over_changing_inputs(num_tokens: int, capture: Any, without_pdl: Any) -> None:
    """Replays over many inputs on scratch full of NaN equal eager calls without dependent launch, from a capture of all -1."""
    inputs = QWEN.like(num_tokens=num_tokens).make("cuda")
    call, generator = Call(inputs, "gate_up"), torch.Generator("cuda").manual_seed(3)
    inputs.token_lora_mapping.fill_(-1)
    graph = capture(call.run)
    assert_bitwise(graph.replay(), call.output)
    for _ in range(30):
        scores = torch.rand(num_tokens, 128, generator=generator, device="cuda")
        inputs.topk_ids.copy_(scores.topk(8, dim=1).indices)
        inputs.token_lora_mapping.copy_(torch.randint(-1, 8, (num_tokens,), generator=generator, device="cuda"))
        call.x.normal_(generator=generator)
        assert_bitwise(graph.replay(), without_pdl(call.run))


def test_same_call_gives_the_same_bits() -> None:
    """Twenty calls agree in every bit."""
    call = Call(QWEN.like(num_tokens=64).make("cuda"), "gate_up")
    first = call.run()
    for _ in range(20):
        assert_bitwise(call.run(), first)


@pytest.mark.parametrize("rank", [16, 96])
@pytest.mark.parametrize("num_tokens, block_size", [(16, 16), (8192, 64), (20000, 64)])
def test_exact_on_integers(num_tokens: int, block_size: int, rank: int) -> None:
    """Integer inputs give the integer result at each tile height."""
    case = Case(
        "integers", num_tokens=num_tokens, num_experts=4, top_k=1, hidden_size=256, intermediate_size=512, max_loras=3,
        max_lora_rank=rank, dtype=torch.bfloat16,
    )  # fmt: skip
    inputs, generator = case.make("cuda"), torch.Generator("cuda").manual_seed(4)
    call = Call(inputs, "down", block_size=block_size)
    inside = call.output[..., call.columns]
    for tensor, density in ((call.x, 0.02), (inputs.lora_a2, 1.0), (inputs.lora_b2, 4 / rank), (inside, 1.0)):
        values = torch.randint(-1, 2, tensor.shape, generator=generator, device="cuda")
        tensor.copy_(values * (torch.rand(tensor.shape, generator=generator, device="cuda") < density))
    got, want = call.run()[..., call.columns], call.exact()[..., call.columns]
    assert want.abs().max() <= 256
    assert torch.equal(got.double(), want)
