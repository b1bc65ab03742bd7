"""The launch list on the GPU: the bits of launches one by one, in graphs, on streams and threads; errors after good calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import moelora_ops
from moelora_ops.kernels import native
from moelora_ops.kernels.triton import experts
from moelora_ops.kernels.triton.call import TENSORS
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.oracle import assert_bitwise

pytestmark = pytest.mark.skipif(bool(native.CUDA_MISSING), reason="needs _C_cuda: built where there is nvcc")

QWEN = MODELS["qwen3-30b-a3b"]


def run(inputs: Inputs, *, adapters: bool = True, **changes: Any) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    return moelora_ops.fused_experts_lora(*args, **{**kwargs, **changes})


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """No plan is known when a test begins."""
    found: dict[Any, Any] = {}
    monkeypatch.setattr(experts, "_PLANS", found)
    return found


def one_by_one(inputs: Inputs, plans: dict[Any, Any], **options: Any) -> Tensor:
    """The call by Triton's launcher, whatever its plan would do."""
    args, kwargs = inputs.experts(**options)
    plan = experts.make_plan(experts.prepare(*args, **kwargs))
    plan.listable = False
    out = plan.run(experts.prepare(*args, **kwargs))
    assert plan.launches is None
    return out


def is_small(plan: Any, inputs: Inputs) -> bool:
    """Whether a weight of the plan is described and below the size from which maps are ours."""
    described = ((plan.w13_descriptor, inputs.w13), (plan.w2_descriptor, inputs.w2))
    return any(used and weight.untyped_storage().nbytes() < 2**18 for used, weight in described)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.num_tokens], ids=str)
def test_every_case(case: Case, dtype: torch.dtype, plans: dict[Any, Any]) -> None:
    """First and second call have the bits of launches made one by one, with and without adapters."""
    inputs, other = (case.like(dtype=dtype).make("cuda", seed) for seed in (0, 1))
    for adapters in (True, False):
        for given in (inputs, other, inputs):
            assert_bitwise(run(given, adapters=adapters), one_by_one(given, plans, adapters=adapters))
    assert all(plan.launches is not None or is_small(plan, inputs) for plan in plans.values())


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 128, 512, 2048])
def test_real_sizes(num_tokens: int, plans: dict[Any, Any]) -> None:
    """Every choice of tiles, weights by the copy engine among them."""
    inputs = QWEN.like(num_tokens=num_tokens, adapters="mixed").make("cuda")
    for adapters in (True, False):
        want = one_by_one(inputs, plans, adapters=adapters)
        for _ in range(3):
            assert_bitwise(run(inputs, adapters=adapters), want)
    assert all(plan.launches is not None for plan in plans.values())
    if num_tokens == 2048:
        assert all(plan.w13_descriptor and plan.w2_descriptor for plan in plans.values())


def test_interleaved_by_the_copy_engine(plans: dict[Any, Any]) -> None:
    """gpt-oss at a size that describes its weights: a map of alternating rows, biases, a limit."""
    inputs = MODELS["gpt-oss-20b"].like(num_tokens=2048, adapters="mixed", max_loras=2).make("cuda")
    want = one_by_one(inputs, plans)
    assert_bitwise(run(inputs), want)
    assert_bitwise(run(inputs), want)
    (plan,) = plans.values()
    assert plan.launches is not None and plan.w13_descriptor


@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_graph(num_tokens: int, capture: Any, plans: dict[Any, Any]) -> None:
    """A captured list follows other values of its inputs, on scratch full of NaN."""
    case = QWEN.like(num_tokens=num_tokens, adapters="mixed")
    inputs = case.make("cuda")
    graph = capture(lambda: run(inputs))
    assert all(plan.launches is not None for plan in plans.values())
    for seed in (1, 2, 0):
        other = case.make("cuda", seed)
        for name in ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping"):
            getattr(inputs, name).copy_(getattr(other, name))
        assert_bitwise(graph.replay(), one_by_one(inputs, plans))


def test_first_call_within_a_capture(capture: Any) -> None:
    """Nothing has to be warmed up but the compiler."""
    inputs = QWEN.like(num_tokens=16).make("cuda")
    want = run(inputs)
    experts._PLANS.clear()
    assert_bitwise(capture(lambda: run(inputs), warm_up=False).replay(), want)


def test_on_another_stream(plans: dict[Any, Any]) -> None:
    """The current stream is the one of the call, not of the plan."""
    inputs = QWEN.like(num_tokens=64, adapters="mixed").make("cuda")
    want = run(inputs)
    x, stream = inputs.hidden_states.clone(), torch.cuda.Stream()
    inputs.hidden_states.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # were the launches elsewhere, they would see the zeros
        inputs.hidden_states.copy_(x)
        got = run(inputs)
    stream.synchronize()
    assert_bitwise(got, want)


def test_threads_share_a_plan() -> None:
    """New threads, each with inputs and a stream of its own, or all on the default one."""
    case = QWEN.like(num_tokens=16, adapters="mixed")
    first = case.make("cuda")
    sets = [first] + [first.replace(hidden_states=torch.randn_like(first.hidden_states)) for _ in range(3)]
    wants = [run(inputs) for inputs in sets]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(index: int, own_stream: bool) -> None:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            got = [run(sets[index]) for _ in range(50)]
        stream.synchronize()
        wrong.extend(f"thread {index}" for out in got if not torch.equal(out, wants[index]))

    for own_stream in (True, False):
        threads = [threading.Thread(target=work, args=(index, own_stream)) for index in range(len(sets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_plan_may_be_used_first_in_a_new_thread() -> None:
    """A thread without a context of its own launches on the default stream."""
    inputs = QWEN.like(num_tokens=1).make("cuda")
    want, results = run(inputs), []
    thread = threading.Thread(target=lambda: results.append(run(inputs)))
    thread.start()
    thread.join()
    assert_bitwise(results[0], want)


def test_sizes_that_route_does_not_serve(plans: dict[Any, Any]) -> None:
    """More keys than the shared memory of a cluster holds, of more pairs than are sorted without: nothing is launched then."""
    case = Case("many-keys", num_tokens=400, num_experts=1024, max_loras=300, max_lora_rank=1, dtype=torch.bfloat16)
    inputs = case.like(hidden_size=16, intermediate_size=16).make("cuda")
    want = one_by_one(inputs, plans)
    for _ in range(2):
        assert_bitwise(run(inputs), want)
    (plan,) = plans.values()
    assert plan.launches is None and not plan.listable


@pytest.mark.parametrize("name", ("w13", "topk_ids", "token_lora_mapping", "lora_b13", "lora_ranks"))
def test_bad_arguments_raise_after_a_good_call(name: str) -> None:
    """Another device, dtype, shape or layout in one tensor of a call that was served before."""
    inputs = QWEN.like(num_tokens=4, num_experts=16, ranks=(16,) * 8, max_loras=8).make("cuda")
    for _ in range(2):
        run(inputs)
    tensor: Tensor = getattr(inputs, name)
    with pytest.raises(ValueError, match=f"{name} must be on cuda:0 like hidden_states, got cpu"):
        run(inputs.replace(**{name: tensor.cpu()}))
    with pytest.raises(TypeError, match=f"{name} must have dtype"):
        run(inputs.replace(**{name: tensor.double()}))
    with pytest.raises(ValueError, match=f"{name} must be {tensor.dim()}-dimensional"):
        run(inputs.replace(**{name: tensor[None]}))
    with pytest.raises(ValueError, match=f"{name} must have a strided layout, got torch.sparse_coo"):
        run(inputs.replace(**{name: tensor.to_sparse()}))
    if tensor.dim() > 2:
        with pytest.raises(ValueError, match=f"{name} must be contiguous in its last dimension"):
            run(inputs.replace(**{name: tensor.repeat_interleave(2, dim=-1)[..., ::2]}))


def test_views_of_small_tensors(plans: dict[Any, Any]) -> None:
    """Ids, weights, ranks and flags that are not contiguous, or not aligned, are read as they are."""
    inputs = QWEN.like(num_tokens=8, num_experts=16, max_loras=4, ranks=(16, 8, 16, 4), disabled=(1,)).make("cuda")
    want = run(inputs)
    for name in TENSORS:
        tensor: Tensor | None = getattr(inputs, name)
        if tensor is None or name not in ("topk_weights", "topk_ids", "token_lora_mapping", "lora_ranks", "adapter_enabled"):
            continue
        apart = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]
        shifted = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
        for view in (apart, shifted):
            for _ in range(2):
                assert_bitwise(run(inputs.replace(**{name: view})), want, name)
