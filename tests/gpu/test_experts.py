"""The layer op on the GPU: values at real sizes, addresses past 2^31 elements, CUDA graphs, streams, exactness."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

import moelora_ops
from moelora_ops.kernels import config
from moelora_ops.kernels.triton import experts
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts

QWEN = MODELS["qwen3-30b-a3b"]
SMALL = QWEN.like("small", num_experts=32, hidden_size=512, intermediate_size=256, adapters="mixed")
BATCH = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def run(inputs: Inputs, *, adapters: bool = True, **changes: Any) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    return moelora_ops.fused_experts_lora(*args, **{**kwargs, **changes})


def check(case: Case, *, poison: bool = False, seed: int = 0) -> None:
    """Base and delta, each against the fp64 reference."""
    inputs = case.make("cuda", seed)
    given = inputs.poisoned() if poison else inputs
    base, want_base = run(given, adapters=False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, TOLERANCES[case.dtype], what="base")
    assert_delta_close(run(given), base, exact_experts(inputs), want_base)


def batches(inputs: Inputs, count: int) -> list[dict[str, Tensor]]:
    """Other tokens, choices, weights and slots for the same model."""
    case, out = inputs.case, []
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        scores = torch.rand(case.num_tokens, case.num_experts, generator=generator, device="cuda")
        weights, ids = scores.topk(case.top_k, dim=1)
        slots = torch.randint(-1, case.max_loras, (case.num_tokens,), generator=generator, device="cuda")
        x = torch.randn(inputs.hidden_states.shape, generator=generator, device="cuda")
        out.append(dict(zip(BATCH, (x.to(case.dtype), weights.softmax(1), ids.int(), slots.int()))))
    return out


def fill(inputs: Inputs, batch: dict[str, Tensor]) -> None:
    for name, value in batch.items():
        getattr(inputs, name).copy_(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case, dtype: torch.dtype) -> None:
    """The formula for each case and dtype, with NaN in unused slots, rank padding and unused experts."""
    check(case.like(dtype=dtype), poison=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 32, 128, 512, 2048])
def test_qwen(num_tokens: int) -> None:
    """Qwen3-30B-A3B with 8 adapters of rank 16, at every batch size that chooses other tiles."""
    check(QWEN.like(num_tokens=num_tokens, adapters="mixed"), poison=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [8, 512])
def test_qwen_in_other_dtypes(num_tokens: int, dtype: torch.dtype) -> None:
    """The same in fp16, and in fp32 at full precision."""
    check(QWEN.like(num_tokens=num_tokens, dtype=dtype, adapters="mixed"))


@pytest.mark.parametrize("num_tokens", [3, 200])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {QWEN.name}))
def test_real_models(name: str, num_tokens: int) -> None:
    """Real shapes with their activation, layout, biases and scaling."""
    check(MODELS[name].like(num_tokens=num_tokens, adapters="mixed", max_loras=3))


@pytest.mark.parametrize("num_tokens", [5, 600])
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 20, 24, 48, 96, 128, 160, 256])
def test_ranks(rank: int, num_tokens: int) -> None:
    """Any rank of the pool, one adapter of the full rank and one of a lower."""
    check(SMALL.like(num_tokens=num_tokens, max_loras=2, max_lora_rank=rank, ranks=(rank, max(rank // 2, 1))), poison=True)


def test_small_adapters_in_a_large_pool() -> None:
    """Rank 8 in a pool of 64 whose padding is NaN."""
    check(QWEN.like(num_tokens=64, max_loras=3, max_lora_rank=64, ranks=(8, 8, 64)), poison=True)


@pytest.mark.parametrize("num_tokens", [1, 16, 256, 2048])
def test_rows_without_adapter_keep_their_bits(num_tokens: int) -> None:
    """Rows of -1 in a mixed batch, and a batch of -1 alone, are bitwise the layer without adapters."""
    inputs = QWEN.like(num_tokens=num_tokens, adapters="mixed").make("cuda")
    base, mapping = run(inputs, adapters=False), inputs.token_lora_mapping
    assert_bitwise(run(inputs)[mapping < 0], base[mapping < 0], "rows of -1")
    assert_bitwise(run(inputs.replace(token_lora_mapping=torch.full_like(mapping, -1))), base, "all -1")
    assert_bitwise(run(inputs, adapter_enabled=torch.zeros(8, dtype=torch.int32, device="cuda")), base, "all disabled")


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 512, 2048])
def test_same_call_gives_the_same_bits(num_tokens: int) -> None:
    """Twenty calls agree in every bit."""
    inputs = QWEN.like(num_tokens=num_tokens).make("cuda")
    first = run(inputs)
    for _ in range(20):
        assert_bitwise(run(inputs), first)


def test_nan_in_one_adapter_stays_there() -> None:
    """A slot whose B is NaN or Inf spoils its own rows alone, in blocks that it shares."""
    inputs = SMALL.like(num_tokens=512).make("cuda")
    clean, slots = run(inputs), inputs.token_lora_mapping
    inputs.lora_b13[0], inputs.lora_b2[0] = torch.nan, torch.inf
    got = run(inputs)
    assert_bitwise(got[slots != 0], clean[slots != 0])
    assert not got[slots == 0].isfinite().all(1).any()


def test_peak_memory() -> None:
    """Scratch is act and rows in bf16, z and the routing: nothing grows with slots or experts."""
    inputs = QWEN.like(num_tokens=2048, max_loras=8).make("cuda")
    run(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run(inputs)
    pairs, rank = inputs.case.num_pairs, inputs.case.max_lora_rank
    bound = pairs * (768 + 2048) * 2 + pairs * (2 * rank * 4 * 8 + 4 * 16) + out.nbytes + 2**20
    assert torch.cuda.max_memory_allocated() - before <= bound


def test_weights_past_int32(far: Callable[[Tensor], Tensor]) -> None:
    """Every input tensor in strides that lead past 2^31 elements."""
    case = SMALL.like(num_tokens=24, num_experts=4, top_k=2, max_loras=2, bias=True)
    inputs = case.make("cuda")
    want, base = run(inputs), run(inputs, adapters=False)
    for name in ("hidden_states", "w13", "w2", "lora_a13", "lora_b13", "lora_a2", "lora_b2", "w13_bias", "w2_bias"):
        moved = inputs.replace(**{name: far(getattr(inputs, name))})
        assert_bitwise(run(moved), want, name)
    assert not torch.equal(want, base)


@pytest.mark.parametrize("sizes", [(70_000, 64, 4096), (40_000, 8192, 64)], ids=["act", "rows"])
def test_scratch_past_int32(sizes: tuple[int, int, int]) -> None:
    """Intermediates of more than 2^31 elements: the last tokens get what they get alone."""
    num_tokens, hidden_size, intermediate_size = sizes
    case = SMALL.like(num_tokens=num_tokens, num_experts=8, max_loras=2)
    case = case.like(hidden_size=hidden_size, intermediate_size=intermediate_size)
    inputs = case.make("cuda")
    assert case.num_pairs * max(hidden_size, intermediate_size) > 2**31
    got, got_base = run(inputs)[-64:].clone(), run(inputs, adapters=False)[-64:].clone()
    tail = inputs.replace(**{name: getattr(inputs, name)[-64:] for name in BATCH})
    want, want_base = exact_experts(tail), exact_experts(tail, adapters=False)
    assert_close(got_base, want_base, TOLERANCES[case.dtype])
    assert_delta_close(got, got_base, want, want_base)


def test_weights_of_more_than_int32_elements() -> None:
    """A w13 of 2.2 G elements, choices among its last experts."""
    case = SMALL.like(num_tokens=5, num_experts=17, top_k=2, hidden_size=4096, intermediate_size=16384, max_loras=1)
    inputs = case.make("cuda")
    inputs.topk_ids.copy_(torch.tensor([16, 15], device="cuda"))
    assert inputs.w13.numel() > 2**31
    assert_close(run(inputs), exact_experts(inputs), TOLERANCES[case.dtype])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 8, 16, 32, 64])
def test_graph_replay_over_changing_inputs(num_tokens: int, capture: Any, without_pdl: Any) -> None:
    """Replays over many different inputs, back to back on scratch full of NaN, equal eager calls without dependent launch."""
    inputs = QWEN.like(num_tokens=num_tokens).make("cuda")
    many = batches(inputs, 40)
    graph = capture(lambda: run(inputs))
    got = []
    for batch in many:
        fill(inputs, batch)
        got.append(graph.replay())
    for batch, out in zip(many, got):
        fill(inputs, batch)
        assert_bitwise(out, without_pdl(lambda: run(inputs)))
    assert_close(got[-1], exact_experts(inputs), TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_graphs_of_several_layers(num_tokens: int, capture: Any, without_pdl: Any) -> None:
    """The same where one layer's output is the next one's input, so that their kernels are neighbours."""
    case = SMALL.like(num_tokens=num_tokens, gated=False, activation="gelu", routed_scaling_factor=2.5)
    inputs = case.make("cuda")

    def layers() -> Tensor:
        x = inputs.hidden_states
        for _ in range(6):
            x = run(inputs.replace(hidden_states=x))
        return x

    many, graph = batches(inputs, 30), capture(layers)
    for batch in many:
        fill(inputs, batch)
        got = graph.replay()
        assert got.isfinite().all() and got.abs().mean() > 1e-3
        assert_bitwise(got, without_pdl(layers))


def test_graph_captured_without_adapters_serves_them(capture: Any) -> None:
    """Captured while nothing was mapped, replayed with adapters, and back: the graph follows the mapping."""
    inputs = QWEN.like(num_tokens=8).make("cuda")
    live, base = inputs.token_lora_mapping.clone(), run(inputs, adapters=False)
    want = run(inputs)
    inputs.token_lora_mapping.fill_(-1)
    graph = capture(lambda: run(inputs))
    assert_bitwise(graph.replay(), base)
    inputs.token_lora_mapping.copy_(live)
    assert_bitwise(graph.replay(), want)
    inputs.token_lora_mapping[3:] = -1  # the stale tail of a padded batch
    mixed = graph.replay()
    assert_bitwise(mixed[:3], want[:3])
    assert_bitwise(mixed[3:], base[3:])


def test_graph_follows_ranks_switches_and_weights(capture: Any) -> None:
    """A swap of weights, ranks and switches in place needs no new capture."""
    case = QWEN.like(num_tokens=16, max_loras=2, ranks=(16, 8), disabled=())
    inputs, other = case.make("cuda"), case.make("cuda", seed=1)
    graph = capture(lambda: run(inputs))
    first = graph.replay()

    def swap(*names: str) -> None:
        fill(inputs, {name: getattr(other, name) for name in names})

    changes: list[Callable[[], Any]] = [
        lambda: inputs.lora_ranks.copy_(torch.tensor([4, 16])),
        lambda: inputs.adapter_enabled[:1].zero_(),
        lambda: swap("lora_a13", "lora_b13", "lora_a2", "lora_b2"),
        lambda: inputs.adapter_enabled[:1].fill_(1),
        lambda: swap("w13", "w2", "hidden_states", "topk_ids", "topk_weights"),
    ]
    for change in changes:
        change()
        got = graph.replay()
        assert not torch.equal(got, first)
        assert_bitwise(got, run(inputs))
        first = got


def test_side_streams() -> None:
    """Two streams at once, inputs produced on the stream just before: each call uses its own stream and scratch."""
    case = QWEN.like(num_tokens=32)
    inputs = case.make("cuda")
    many = batches(inputs, 8)
    want = [run(inputs.replace(**batch)) for batch in many]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    got = []
    for n, batch in enumerate(many):
        with torch.cuda.stream(streams[n % 4]):
            torch.cuda._sleep(1_000_000)
            x = batch["hidden_states"] + 0
            got.append(run(inputs.replace(**{**batch, "hidden_states": x})))
    torch.cuda.synchronize()
    for out, expected in zip(got, want):
        assert_bitwise(out, expected)


FIRST_CALL = """
import torch, moelora_ops
from moelora_ops.testing.cases import MODELS
inputs = MODELS["qwen3-30b-a3b"].like(num_tokens=4).make("cuda")
args, kwargs = inputs.experts()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = moelora_ops.fused_experts_lora(*args, **kwargs)
out.fill_(torch.nan)
graph.replay()
assert torch.equal(out, moelora_ops.fused_experts_lora(*args, **kwargs))
"""


def test_first_call_inside_a_capture() -> None:
    """In a fresh process the very first call may be the captured one: compiling and loading kernels is legal in a capture."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_second_device() -> None:
    """Tensors of a device that is not current are served there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs = SMALL.make("cuda:1")
    got = run(inputs)
    assert got.device.index == 1
    assert_close(got, exact_experts(inputs), TOLERANCES[torch.bfloat16])


def integers(case: Case) -> Inputs:
    """Inputs whose every intermediate is an integer up to 256, exact in bf16: any deviation is a miscompiled kernel."""
    inputs = case.make("cuda")
    generator = torch.Generator("cuda").manual_seed(2)

    def sparse(like: Tensor, count: int, limit: int) -> Tensor:
        """Zeros but for `count` entries of a row, integers up to `limit`."""
        at = torch.rand(like.shape, generator=generator, device="cuda").topk(min(count, like.shape[-1]), dim=-1).indices
        sign = torch.randint(0, 2, at.shape, generator=generator, device="cuda") * 2 - 1
        value = sign * torch.randint(1, limit + 1, at.shape, generator=generator, device="cuda")
        return torch.zeros(like.shape, device="cuda").scatter_(-1, at, value.float()).to(like.dtype)

    dense = torch.randint(-2, 3, inputs.w13.shape, generator=generator, device="cuda").to(case.dtype)
    a13 = torch.randint(-1, 2, inputs.lora_a13.shape, generator=generator, device="cuda").to(case.dtype)
    return inputs.replace(
        hidden_states=sparse(inputs.hidden_states, 2, 1), w13=dense, lora_a13=a13, lora_b13=sparse(inputs.lora_b13, 2, 1),
        w2=sparse(inputs.w2, 2, 1), lora_a2=sparse(inputs.lora_a2, 1, 1), lora_b2=sparse(inputs.lora_b2, 1, 1),
        topk_weights=torch.ones_like(inputs.topk_weights),
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens, block_m", [(16, 16), (256, 64), (1024, 128)])
@pytest.mark.parametrize("rank", [16, 64])
def test_exact_on_integers(rank: int, num_tokens: int, block_m: int, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer inputs give the integer result, for each tile height and depth of the pipeline."""
    case = Case(
        "integers", num_tokens=num_tokens, num_experts=8, top_k=1, hidden_size=1024, intermediate_size=512, max_loras=4,
        max_lora_rank=rank, dtype=torch.bfloat16, activation="relu2", gated=False,
    )  # fmt: skip
    rules = config.experts

    def staged(problem: config.Problem, device: config.Device) -> config.Experts:
        tiles = rules(problem, device)
        stages = ("gate_up", "down", "shrink13", "shrink2")
        parts = {name: dataclasses.replace(getattr(tiles, name), num_stages=num_stages) for name in stages}
        for name in ("gate_up", "down"):
            parts[name] = dataclasses.replace(parts[name], expand_stages=num_stages)
        changed = dataclasses.replace(tiles, **parts)
        assert changed.gate_up.block_m == block_m and config.is_valid(changed, problem, device)
        return changed

    monkeypatch.setattr(config, "experts", staged)
    monkeypatch.setattr(experts, "_PLANS", {})
    inputs = integers(case)
    want = exact_experts(inputs)
    assert want.abs().max() <= 256 and not torch.equal(want, exact_experts(inputs, adapters=False))
    assert torch.equal(run(inputs).double(), want)
