"""The op behind the activation rewrite, and every rewrite under Inductor, on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import moelora_ops.compile
from moelora_ops import reference
from moelora_ops.ops.fused_moe_lora_activation import OP
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, upcast
from moelora_ops.testing.passes import Activated, Eager, Layer, batch

QWEN = MODELS["qwen3-30b-a3b"]


class Call:
    """The first projection of a case on a random base, and its activation."""

    def __init__(self, inputs: Inputs, *, activation: str = "silu", block_size: int = 16, weighted: bool = False) -> None:
        case, generator = inputs.case, torch.Generator("cuda").manual_seed(1)
        self.inputs, self.block_size, self.activation = inputs, block_size, activation

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(case.dtype)

        self.x = randn(case.num_tokens, case.hidden_size)
        self.base = randn(case.num_tokens, case.top_k, case.num_slices * case.intermediate_size)
        self.weights = inputs.topk_weights * case.top_k
        self.kwargs: dict[str, Any] = dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted)

    def run(self) -> Tensor:
        args, kwargs = self.inputs.align(self.block_size)
        table = moelora_ops.moe_lora_align_block_size(*args, **kwargs)
        lora = self.inputs.gate_up_lora()
        result: Tensor = OP(self.base, self.x, *lora, self.weights, *table, **self.kwargs, activation=self.activation)
        return result

    def exact(self, *, adapters: bool = True) -> Tensor:
        output = self.base.double()
        if adapters:
            args, kwargs = self.inputs.align(self.block_size)
            table = reference.moe_lora_align_block_size(*args, **kwargs)
            lora = self.inputs.gate_up_lora()
            reference.fused_moe_lora(output, *upcast((self.x, *lora, self.weights, *table)), **self.kwargs)
        gated = self.inputs.case.gated
        return reference.activate(output, self.activation, gated=gated, interleaved=False, alpha=0.0, limit=None)

    def check(self, clean: Call | None = None) -> None:
        """Rows with an adapter relative to what it changes; the others relative to themselves."""
        before, got = self.base.clone(), self.run()
        want, plain = (clean or self).exact(), (clean or self).exact(adapters=False)
        touched = (want - plain).ne(0).any(-1)
        assert_close(got[~touched], plain[~touched], TOLERANCES[got.dtype], what="rows without adapter")
        assert_close(got[touched], want[touched], TOLERANCES[got.dtype], scale=(want - plain)[touched])
        assert_bitwise(self.base, before, "the base is not written")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved], ids=str)
def test_every_case(case: Case, dtype: torch.dtype) -> None:
    """The formula for each case and dtype, with NaN in unused slots and rank padding."""
    inputs, activation = case.like(dtype=dtype).make("cuda"), "silu" if case.activation == "swigluoai" else case.activation
    Call(inputs.poisoned(), activation=activation).check(Call(inputs, activation=activation))


@pytest.mark.parametrize("num_tokens", [1, 7, 32, 128, 512, 2048])
def test_qwen(num_tokens: int) -> None:
    """Qwen3-30B-A3B with 8 adapters of rank 16 and tokens without one, at every batch size that chooses other tiles."""
    inputs = QWEN.like(num_tokens=num_tokens, adapters="mixed").make("cuda")
    Call(inputs, block_size=16 if num_tokens <= 128 else 64, weighted=True).check()


@pytest.mark.parametrize("rank, block_size", [(1, 16), (12, 1), (48, 24), (96, 128), (256, 64)])
def test_ranks_and_block_sizes(rank: int, block_size: int) -> None:
    """Any rank of the pool and any block size."""
    case = QWEN.like(num_tokens=40, num_experts=16, top_k=4, max_loras=2, max_lora_rank=rank, ranks=(rank, max(rank // 2, 1)))
    Call(case.make("cuda").poisoned(), block_size=block_size).check(Call(case.make("cuda"), block_size=block_size))


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_graph_replay_over_changing_inputs(
    num_tokens: int, capture: Any, without_pdl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays over many inputs on scratch full of NaN equal eager calls without dependent launch, from a capture of all -1."""
    from moelora_ops.kernels.triton import delta_activation

    inputs = QWEN.like(num_tokens=num_tokens).make("cuda")
    call, generator = Call(inputs), torch.Generator("cuda").manual_seed(3)
    inputs.token_lora_mapping.fill_(-1)
    graph = capture(call.run)
    assert_close(graph.replay(), call.exact(), TOLERANCES[torch.bfloat16])
    plans = delta_activation._PLANS
    for _ in range(20):
        scores = torch.rand(num_tokens, 128, generator=generator, device="cuda")
        inputs.topk_ids.copy_(scores.topk(8, dim=1).indices)
        inputs.token_lora_mapping.copy_(torch.randint(-1, 8, (num_tokens,), generator=generator, device="cuda"))
        call.x.normal_(generator=generator)
        monkeypatch.setattr(delta_activation, "_PLANS", {})
        want = without_pdl(call.run)
        monkeypatch.setattr(delta_activation, "_PLANS", plans)
        assert_bitwise(graph.replay(), want)


MODULES = (
    (Eager, "einsum"), (Eager, "flat table"), (Eager, "matmul"), (Activated, "chunk"), (Activated, "gelu"), (Layer, "einsum"),
    (Layer, "weight in the sum"), (Layer, "histogram"), (Layer, "search"),
)  # fmt: skip


@pytest.mark.parametrize("kind, spelling", MODULES, ids=lambda p: getattr(p, "__name__", p))
def test_rewrites_fire_under_inductor(kind: Any, spelling: str) -> None:
    """One rewrite each, static and then dynamic, with the values of fp64 relative to the delta."""
    module = kind(spelling, dtype=torch.bfloat16, device="cuda")
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad(), moelora_ops.compile.enable() as rewrites:
        compiled = torch.compile(module, fullgraph=True)
        for num_tokens in (24, 40):
            x, mapping = batch(num_tokens, dtype=torch.bfloat16, device="cuda")
            exact, none = module.exact(x, mapping), module.exact(x, torch.full_like(mapping, -1))
            assert_close(compiled(x, mapping), exact, TOLERANCES[torch.bfloat16], scale=exact - none)
    assert sum(rewrites.fired.values()) - rewrites.fired["shared_align"] == 2, rewrites.fired
