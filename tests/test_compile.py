"""The ops under torch.compile, export, fake CUDA tensors and a simulated CUDA-graph capture."""

from __future__ import annotations

import io
import signal
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from moelora_ops.testing.capture import FakeGraph
from moelora_ops.testing.cases import Case
from moelora_ops.testing.numerics import TOLERANCES, assert_close

CASE = Case("compiled", num_experts=6, hidden_size=32, intermediate_size=24, max_loras=3, max_lora_rank=8)
BATCH_SIZES = (1, 2, 3, 4, 5, 8, 16, 31, 64, 100, 128)  # torch always specialises a size of 1, so it comes first
ops = torch.ops.moelora


@pytest.fixture(autouse=True)
def fresh_and_bounded() -> Iterator[None]:
    """No compiled code is left from another test, and a compile that hangs fails after 150 s instead of stopping the run."""

    def expired(*_: Any) -> None:
        raise TimeoutError("the test took more than 150 s")

    torch._dynamo.reset()
    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(150)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


class Block(nn.Module):
    """A router and an expert layer; buffers are what a pool would own."""

    def __init__(self, case: Case = CASE) -> None:
        super().__init__()
        inputs = case.make()
        self.case, self.top_k, self.num_experts = case, case.top_k, case.num_experts
        self.router = nn.Buffer(torch.randn(case.num_experts, case.hidden_size, generator=torch.Generator().manual_seed(3)))
        for name in ("w13", "w2", "lora_a13", "lora_b13", "lora_a2", "lora_b2"):
            self.register_buffer(name, getattr(inputs, name))
        self.lora_ranks = nn.Buffer(torch.tensor([8, 3, 5], dtype=torch.int32))
        self.adapter_enabled = nn.Buffer(torch.ones(3, dtype=torch.int32))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, topk_ids = F.linear(x, self.router).softmax(-1).topk(self.top_k)
        return weights, topk_ids.int()

    def chosen(self, weight: Tensor, topk_ids: Tensor) -> Tensor:
        """Each pair's expert weight, [T, K, out, in]."""
        return weight.index_select(0, topk_ids.flatten()).unflatten(0, topk_ids.shape)

    def swap(self, slot: int, seed: int) -> None:
        """Another adapter in place, as a pool loads it."""
        generator = torch.Generator().manual_seed(seed)
        for lora in (self.lora_a13, self.lora_b13, self.lora_a2, self.lora_b2):
            lora[slot] = torch.randn(lora[slot].shape, generator=generator) * lora[slot].std()


class Fused(Block):
    """The layer as one op."""

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        weights, topk_ids = self.route(x)
        lora = (self.lora_a13, self.lora_b13, self.lora_a2, self.lora_b2)
        flags = dict(lora_ranks=self.lora_ranks, adapter_enabled=self.adapter_enabled)
        return x + ops.fused_experts_lora(x, self.w13, self.w2, weights, topk_ids, mapping, *lora, **flags)


class Engine(Block):
    """The layer as a serving engine has it: its own base GEMMs, one alignment, a delta on each."""

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        weights, topk_ids = self.route(x)
        enabled = self.adapter_enabled
        aligned = ops.moe_lora_align_block_size(topk_ids, mapping, self.num_experts, 16, 3, adapter_enabled=enabled)
        gate_up = torch.einsum("th,tknh->tkn", x, self.chosen(self.w13, topk_ids))
        a13, b13 = self.lora_a13.chunk(2, dim=2), self.lora_b13.chunk(2, dim=2)
        ops.fused_moe_lora(gate_up, x, list(a13), list(b13), weights, *aligned, lora_ranks=self.lora_ranks)
        gate, up = gate_up.chunk(2, dim=-1)
        h = F.silu(gate) * up
        down = torch.einsum("tki,tkhi->tkh", h, self.chosen(self.w2, topk_ids)) * weights[..., None]
        ops.fused_moe_lora(
            down, h.flatten(0, 1), [self.lora_a2], [self.lora_b2], weights, *aligned, lora_ranks=self.lora_ranks,
            mul_routed_weight=True,
        )  # fmt: skip
        return x + down.sum(1)


BLOCKS = pytest.mark.parametrize("block", [Fused, Engine], ids=lambda b: b.__name__)


def batch(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    mapping = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    return torch.randn(num_tokens, CASE.hidden_size, generator=generator), mapping


def check(compiled: Callable[..., Tensor], eager: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert_close(compiled(*args), eager(*args), TOLERANCES[torch.float32], what=f"T = {args[0].shape[0]}")


def test_the_two_blocks_are_one_layer() -> None:
    """The engine's way and the fused op compute the same function, adapters included."""
    args = batch(40)
    fused, engine, base = Fused()(*args), Engine()(*args), Fused()(args[0], torch.full_like(args[1], -1))
    assert_close(fused - base, engine - base, TOLERANCES[torch.float32])


@BLOCKS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_at_most_two_compiles_for_eleven_batch_sizes(block: type[Block], backend: str) -> None:
    """fullgraph, default settings: one token and then one dynamic graph, each result eager's; no more with a warm cache.

    A guard that torch reads back from its cache on disk can be narrower than the one it wrote.
    """
    module = block()
    with fresh_cache():
        for _ in ("cold", "warm"):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            compiled = torch.compile(module, fullgraph=True, backend=counter)
            for num_tokens in BATCH_SIZES:
                check(compiled, module, batch(num_tokens))
            assert counter.frame_count <= 2


@BLOCKS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compile_for_an_unbacked_batch(block: type[Block], backend: str) -> None:
    """With the batch size unbacked there is one graph for all sizes, one token and none included."""
    counter, module = CompileCounterWithBackend(backend), block()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for num_tokens in (7, 1, 128, 33, 2, 0):
        x, mapping = batch(num_tokens)
        mark_unbacked(x, 0, shape_id="tokens")
        mark_unbacked(mapping, 0, shape_id="tokens")
        check(compiled, module, (x, mapping))
    assert counter.frame_count == 1


@BLOCKS
def test_adapters_come_and_go_without_a_recompile(block: type[Block]) -> None:
    """Mapping, ranks, contents and enabled flags are data: changing them compiles nothing and changes the result."""
    counter, module = CompileCounterWithBackend("aot_eager"), block()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x, mapping = batch(20)
    seen = [compiled(x, torch.full_like(mapping, -1))]  # traced before any adapter is mapped

    def changed() -> None:
        check(compiled, module, (x, mapping))
        seen.append(compiled(x, mapping))
        assert not torch.equal(seen[-1], seen[-2])

    changed()
    mapping = (mapping + 2) % 4 - 1
    changed()
    module.lora_ranks.copy_(torch.tensor([1, 8, 2]))
    changed()
    module.swap(slot=1, seed=5)
    changed()
    module.adapter_enabled.copy_(torch.tensor([1, 0, 1]))
    changed()
    assert counter.frame_count == 1


def test_offset_and_capacity_follow_dynamic_sizes() -> None:
    """Sizes that the caller derives from tensors (an offset, experts, a block) may be symbolic."""

    def delta(output: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: Tensor, ids: Tensor, mapping: Tensor) -> Tensor:
        aligned = ops.moe_lora_align_block_size(ids, mapping, a.shape[1], x.shape[1] // 2, a.shape[0])
        output = output.clone()
        ops.fused_moe_lora(output, x, [a], [b], weights, *aligned, offset=output.shape[2] - b.shape[2])
        return output

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(delta, fullgraph=True, backend=counter, dynamic=True)
    for size in (3, 5, 6, 9):
        inputs = CASE.like(hidden_size=4 * size, num_tokens=size, max_loras=size - 1, num_experts=size + 1).make()
        ids, weights, mapping = inputs.topk_ids, inputs.topk_weights, inputs.token_lora_mapping
        output, x = torch.randn(size, 2, 7 * size), torch.randn(size * 2, 24)
        args = (output, x, inputs.lora_a2, inputs.lora_b2, weights, ids, mapping)
        assert_close(compiled(*args), delta(*args), TOLERANCES[torch.float32])
    assert counter.frame_count <= 2


def code_of(function: Callable[..., Any], *args: Tensor) -> str:
    with fresh_cache():  # else the code of an earlier version of the ops may answer
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    (code,) = codes
    assert "torch.ops.moelora.fused_moe_lora.default(" in code
    return str(code)


def test_inductor_copies_no_output() -> None:
    """The op writes into the base GEMM's own buffer: not one generated kernel stands between GEMM, delta and return."""
    inputs = CASE.like(num_tokens=5).make()
    aligned = ops.moe_lora_align_block_size(*inputs.align(4)[0])
    (a, b), weights = inputs.down_lora(), inputs.topk_weights
    h, w2 = torch.randn(10, 24), inputs.w2[0]

    def down(h: Tensor, w2: Tensor) -> Tensor:
        output = (h @ w2.T).view(5, 2, -1)
        ops.fused_moe_lora(output, h, a, b, weights, *aligned)
        return output

    def keeps_the_base(h: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        base = (h @ w2.T).view(5, 2, -1)
        output = base.clone()
        ops.fused_moe_lora(output, h, a, b, weights, *aligned)
        return base, output

    code = code_of(down, h, w2)
    assert "extern_kernels.mm" in code and "cpp_fused" not in code and "copy_" not in code
    assert "cpp_fused" in code_of(keeps_the_base, h, w2), "a copy that is needed does show up in the code"


def test_inductor_materialises_no_expanded_adapter() -> None:
    """An A that all experts share, expanded inside the program, reaches the op with its stride of zero."""
    inputs = CASE.like(num_tokens=5).make()
    aligned = ops.moe_lora_align_block_size(*inputs.align(4)[0])

    def delta(output: Tensor, h: Tensor, a: Tensor) -> None:
        ops.fused_moe_lora(output, h, [a[:, :1].expand_as(a)], [inputs.lora_b2], inputs.topk_weights, *aligned)

    assert "cpp_fused" not in code_of(delta, torch.zeros(5, 2, 32), torch.randn(10, 24), inputs.lora_a2)


@BLOCKS
def test_export_saves_loads_and_runs(block: type[Block]) -> None:
    """The exported program keeps the ops, survives a file and serves other batch sizes."""
    module, tokens = block(), torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(module, batch(9), dynamic_shapes={"x": {0: tokens}, "mapping": {0: tokens}})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    targets = {str(node.target) for node in loaded.graph.nodes}
    assert ("moelora.fused_experts_lora.default" if block is Fused else "moelora.fused_moe_lora.default") in targets
    for num_tokens in (2, 9, 100):
        check(loaded.module(), module, batch(num_tokens))


def test_fake_cuda_tensors_keep_device_dtype_and_shape() -> None:
    """On a machine without a GPU the fakes already say what the GPU will return."""
    case = CASE.like(dtype=torch.bfloat16, bias=True, num_global_experts=9)
    inputs = case.make()
    with FakeTensorMode(allow_non_fake_inputs=False):
        for name, value in vars(inputs).items():
            if isinstance(value, Tensor):
                setattr(inputs, name, torch.empty(value.shape, dtype=value.dtype, device="cuda"))
        args, kwargs = inputs.experts()
        out = ops.fused_experts_lora(*args, **kwargs)
        assert (out.device.type, out.dtype, out.shape) == ("cuda", torch.bfloat16, (13, 32))
        args, kwargs = inputs.align(16)
        aligned = ops.moe_lora_align_block_size(*args, **kwargs)
        assert {(t.device.type, t.dtype) for t in aligned} == {("cuda", torch.int32)}
        assert [tuple(t.shape) for t in aligned] == [(3, 176), (3, 11), (3,)]
        output = torch.empty(13, 2, 32, dtype=torch.bfloat16, device="cuda")
        x = torch.empty(26, 24, dtype=torch.bfloat16, device="cuda")
        assert ops.fused_moe_lora(output, x, *inputs.down_lora(), inputs.topk_weights, *aligned) is None


@BLOCKS
def test_capture_without_adapters_replays_with_them(block: type[Block]) -> None:
    """Captured with every token at -1, replayed with a live mapping, new ranks and a swapped adapter: always eager's result."""
    module = block()
    x, mapping = batch(8)
    static_x, static_mapping = torch.zeros_like(x), torch.full_like(mapping, -1)
    with torch.no_grad(), FakeGraph() as graph:
        captured = module(static_x, static_mapping)
    for seed in range(3):
        x, mapping = batch(8, seed)
        static_x.copy_(x)
        static_mapping.copy_(mapping)
        module.swap(slot=seed, seed=seed)
        module.lora_ranks[seed] = seed + 1
        graph.replay()
        assert_close(captured, module(x, mapping), TOLERANCES[torch.float32])
        base = module(x, torch.full_like(mapping, -1))
        assert (captured - base)[mapping >= 0].abs().max() > 0.1, "the delta appears"
    static_mapping.fill_(-1)
    graph.replay()
    assert torch.equal(captured, base)


def test_capture_refuses_what_a_graph_cannot_hold() -> None:
    """The simulation does notice a host read."""
    with pytest.raises(RuntimeError, match="cannot be captured"), FakeGraph():
        torch.ones(3).sum().item()
