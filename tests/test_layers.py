"""`MoeRunner` and `FusedMoEWithLoRA`: the same layer around callables, around weights, and in the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from moelora_ops import FusedMoEWithLoRA, LoraPool, MoeRunner, layers
from moelora_ops.adapters import MoeGeometry, PoolLayer
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.cases import CASES, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts

OPTIONS = (
    "activation",
    "gated",
    "interleaved",
    "swiglu_alpha",
    "swiglu_limit",
    "apply_router_weight_on_input",
    "routed_scaling_factor",
)
BY_NAME = {case.name: case for case in CASES}
DTYPES = (torch.float32, torch.bfloat16)


def callable_case(case: Case) -> Case:
    """Callables take a router weight on the input for K = 1 only."""
    return case.like(top_k=1) if case.apply_router_weight_on_input else case


def pool_layer(inputs: Inputs) -> PoolLayer:
    case = inputs.case
    ranks, enabled = inputs.lora_ranks, inputs.adapter_enabled
    return PoolLayer(
        *(getattr(inputs, name) for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")),
        torch.full((case.max_loras,), case.max_lora_rank, dtype=torch.int32) if ranks is None else ranks,
        torch.ones(case.max_loras, dtype=torch.int32) if enabled is None else enabled,
        case.interleaved,
    )


class Gemm:
    """Somebody's base GEMM: one product per pair, bias included, and NaN where the expert is not here."""

    def __init__(self, weight: Tensor, bias: Tensor | None, expert_map: Tensor | None) -> None:
        self.weight, self.bias, self.expert_map = weight, bias, expert_map
        self.inputs: Tensor | None = None

    def __call__(self, rows: Tensor, topk_ids: Tensor) -> Tensor:
        self.inputs = rows
        num_tokens, top_k = topk_ids.shape
        rows = rows.float() if len(rows) == num_tokens * top_k else rows.float().repeat_interleave(top_k, dim=0)
        rows = rows.view(num_tokens, top_k, rows.shape[1])
        experts = topk_ids.long()
        if self.expert_map is not None:
            known = (experts >= 0) & (experts < len(self.expert_map))
            experts = torch.where(known, self.expert_map.long()[experts.clamp(0, len(self.expert_map) - 1)], -1)
        here = (experts >= 0) & (experts < len(self.weight))
        experts = torch.where(here, experts, 0)
        out = torch.einsum("tkoi,tki->tko", self.weight.float()[experts], rows)
        if self.bias is not None:
            out = out + self.bias.float()[experts]
        return torch.where(here[..., None], out, torch.nan).to(self.weight.dtype)


def around_callables(inputs: Inputs, **changes: Any) -> MoeRunner:
    options = {name: getattr(inputs.case, name) for name in OPTIONS} | {"expert_map": inputs.expert_map, "block_size": 8}
    options |= {"lora": pool_layer(inputs), "num_experts": inputs.case.num_experts} | changes
    gate_up = Gemm(inputs.w13, inputs.w13_bias, inputs.expert_map)
    return MoeRunner(gate_up, Gemm(inputs.w2, inputs.w2_bias, inputs.expert_map), **options)


def around_weights(inputs: Inputs, **changes: Any) -> FusedMoEWithLoRA:
    options = {name: getattr(inputs.case, name) for name in OPTIONS}
    options |= {name: getattr(inputs, name) for name in ("expert_map", "w13_bias", "w2_bias")} | changes
    return FusedMoEWithLoRA(inputs.w13, inputs.w2, pool_layer(inputs), **options)


def run(runner: nn.Module, inputs: Inputs, *, adapters: bool = True) -> Tensor:
    mapping = inputs.token_lora_mapping if adapters else None
    result: Tensor = runner(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, mapping)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_the_delta_is_that_of_the_reference(build: Any, case: Case, dtype: torch.dtype) -> None:
    """Around callables and around weights; rows without adapter are bitwise those of a run without adapters.

    The callables return NaN for experts that are not here: nothing of it arrives.
    """
    case = callable_case(case) if build is around_callables else case
    inputs = case.like(dtype=dtype).make()
    runner = build(inputs)
    with_lora, without = run(runner, inputs), run(runner, inputs, adapters=False)
    expected, expected_base = exact_experts(inputs), exact_experts(inputs, adapters=False)
    assert_close(without, expected_base, TOLERANCES[dtype], what="base")
    assert_delta_close(with_lora, without, expected, expected_base)


@pytest.mark.parametrize("case", [c for c in CASES if c.num_tokens], ids=str)
def test_nothing_is_read_that_is_not_its_own(case: Case) -> None:
    """NaN in unused slots, rank padding, idle experts and weights of pairs without expert changes no bit."""
    case = callable_case(case)
    inputs = case.make()
    assert_bitwise(run(around_callables(inputs.poisoned()), inputs.poisoned()), run(around_callables(inputs), inputs))


def test_one_choice_and_one_slot_keep_the_down_delta() -> None:
    """K = 1, L = 1 (an output-aliasing special case lost it): the down adapter alone, then both."""
    inputs = Case("k1-l1", top_k=1, max_loras=1, adapters="one").make()
    for changed in (inputs.replace(lora_b13=torch.zeros_like(inputs.lora_b13)), inputs):
        runner = around_callables(changed)
        expected, base = exact_experts(changed), exact_experts(changed, adapters=False)
        assert_delta_close(run(runner, changed), run(runner, changed, adapters=False), expected, base)


@pytest.mark.parametrize("half", ["gate", "up"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_have_their_own_a(half: str, interleaved: bool) -> None:
    """sglang 27274, and interleaved B cut into contiguous halves: each half alone is exact, with A_gate != A_up."""
    inputs = Case("halves", interleaved=interleaved, num_tokens=24).make()
    b, rows = inputs.lora_b13.clone(), inputs.case.intermediate_size
    if interleaved:
        b[:, :, int(half == "gate") :: 2] = 0
    elif half == "gate":
        b[:, :, rows:] = 0
    else:
        b[:, :, :rows] = 0
    changed = inputs.replace(lora_b13=b, lora_b2=torch.zeros_like(inputs.lora_b2))
    runner = around_callables(changed)
    expected, base = exact_experts(changed), exact_experts(changed, adapters=False)
    assert_delta_close(run(runner, changed), run(runner, changed, adapters=False), expected, base, what=half)


def test_router_weight_on_the_input_reaches_the_base_and_the_delta() -> None:
    """Llama-4 style, w = 0.3: both GEMMs of the first projection read w * x, and nothing is weighted twice."""
    inputs = BY_NAME["llama4-like"].make()
    inputs = inputs.replace(topk_weights=torch.full_like(inputs.topk_weights, 0.3))
    runner = around_callables(inputs)
    expected, base = exact_experts(inputs), exact_experts(inputs, adapters=False)
    assert_delta_close(run(runner, inputs), run(runner, inputs, adapters=False), expected, base)
    assert isinstance(runner.base_gate_up, Gemm) and runner.base_gate_up.inputs is not None
    assert_close(runner.base_gate_up.inputs, inputs.hidden_states * 0.3, TOLERANCES[torch.float32])


def test_weights_are_used_in_fp32() -> None:
    """vllm 31931: weights 1 + 2**-9 and -1 on the same expert leave 2**-9 of it, which bf16 weights would not; given in bf16
    they are used as they are."""
    inputs = Case("weights", dtype=torch.bfloat16, num_experts=2).make()
    inputs = inputs.replace(topk_ids=torch.zeros_like(inputs.topk_ids))
    inputs = inputs.replace(topk_weights=torch.tensor([1 + 2**-9, -1.0]).expand(13, 2).contiguous())
    runner = around_callables(inputs)
    expected, base = exact_experts(inputs), exact_experts(inputs, adapters=False)
    assert expected.abs().max() > 1e-3
    assert_delta_close(run(runner, inputs), run(runner, inputs, adapters=False), expected, base)
    coarse = inputs.topk_weights.bfloat16()
    for runner in (around_callables(inputs), around_weights(inputs)):
        assert_bitwise(
            run(runner, inputs.replace(topk_weights=coarse)), run(runner, inputs.replace(topk_weights=coarse.float()))
        )


@pytest.mark.parametrize("how", ["disabled", "no pool", "no mapping"])
@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_switched_off_never_touches_lora(build: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No alignment, no delta, no adapter tensor reaches an op; the result is the base, bit by bit."""
    inputs = BY_NAME["plain"].make()
    base = run(build(inputs), inputs, adapters=False)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("LoRA was touched")

    monkeypatch.setattr(layers, "moe_lora_align_block_size", never)
    monkeypatch.setattr(layers, "fused_moe_lora", never)
    runner = build(inputs)
    if how == "disabled":
        runner.lora_enabled = False
    elif how == "no pool":
        runner.lora = None
    poison = PoolLayer(*(torch.full_like(t, 7) for t in dataclasses.astuple(pool_layer(inputs))[:6]))
    if how == "disabled":
        runner.lora = poison
    assert_bitwise(run(runner, inputs, adapters=how != "no mapping"), base)
    if build is around_callables and how == "disabled":
        runner.lora_enabled = True
        with pytest.raises(AssertionError, match="LoRA was touched"):
            run(runner, inputs)


def test_one_routing_serves_both_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alignment runs once a layer."""
    calls = []
    align = layers.moe_lora_align_block_size

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return align(*args, **kwargs)

    monkeypatch.setattr(layers, "moe_lora_align_block_size", counting)
    inputs = BY_NAME["plain"].make()
    run(around_callables(inputs), inputs)
    assert len(calls) == 1


@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_compiled_once_for_any_adapter_mapping_and_rank(build: Any) -> None:
    """fullgraph; at most two compiles over the sizes (static, dynamic); none for a swap, another mapping, rank or switch."""
    case = Case("compiled", num_experts=4, num_tokens=12)
    geometry = MoeGeometry(1, (0,), case.num_experts, case.hidden_size, case.intermediate_size)
    pool = LoraPool.from_config(geometry, max_loras=2, max_rank=16, dtype=torch.float32)
    inputs = case.make()
    runner = build(inputs)
    runner.lora = pool.layer(0)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(runner, fullgraph=True, backend=counter)

    def check(num_tokens: int) -> Tensor:
        args = [t[:num_tokens] for t in (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.token_lora_mapping)]
        got: Tensor = compiled(*args)
        assert_bitwise(got, runner(*args))
        return got

    for num_tokens in (12, 7, 3, 9, 5):
        check(num_tokens)
    assert counter.frame_count <= 2
    compiles, results = counter.frame_count, [check(12)]
    inputs.token_lora_mapping.copy_(torch.arange(12) % 3 - 1)
    for rank, slot in ((16, 0), (3, 1), (8, 0)):
        pool.load(random_adapter(geometry, rank, seed=rank), slot)
        results.append(check(12))
    pool.disable(1)
    results.append(check(12))
    pool.unload(0)
    results.append(check(12))
    assert counter.frame_count == compiles
    assert all(not torch.equal(a, b) for a, b in zip(results, results[1:]))  # each change was seen
    assert_bitwise(results[-1], results[0])  # and in the end nothing is left


def test_state_dict_holds_the_base_alone() -> None:
    """w13, w2 and the biases; the pool's tensors and the expert map are not the model's weights."""
    inputs = BY_NAME["strided"].like(bias=True).make()
    module = around_weights(inputs)
    assert sorted(module.state_dict()) == ["w13", "w13_bias", "w2", "w2_bias"]
    assert [p.requires_grad for p in module.parameters()] == [False, False]
    given = nn.Parameter(inputs.w13.contiguous())
    assert FusedMoEWithLoRA(given, inputs.w2).w13 is given


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "base_gate_up and base_down", {"base_down": torch.zeros(8, 48, 40)}),
        (TypeError, "base_gate_up and base_down", {"base_gate_up": None}),
        (TypeError, "lora", {"lora": torch.zeros(1)}),
        (ValueError, "lora", {"num_experts": 7}),
        (ValueError, "lora", {"interleaved": True}),
        (ValueError, "block_size", {"block_size": 0}),
        (ValueError, "activation", {"activation": "tanh"}),
        (ValueError, "w2_bias", {"w2_bias": torch.zeros(8, 48)}),
        (TypeError, "expert_map", {"expert_map": torch.rand(8)}),
        (ValueError, "expert_map", {"expert_map": torch.zeros(2, 4, dtype=torch.int32)}),
        (TypeError, "expert_map", {"expert_map": [0, 1]}),
        (ValueError, "base_gate_up", {"base_gate_up": torch.zeros(()), "base_down": torch.zeros(8, 48, 40)}),
        (ValueError, "base_down", {"base_gate_up": torch.zeros(8, 80, 48), "base_down": torch.zeros(8, 47, 40)}),
    ],
)
def test_bad_options_are_named(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    """The error's first words are the argument to blame."""
    inputs = BY_NAME["plain"].make()
    bases = {"base_gate_up": Gemm(inputs.w13, None, None), "base_down": Gemm(inputs.w2, None, None)}
    options = bases | {"num_experts": 8, "lora": pool_layer(inputs)}
    MoeRunner(**options)
    with pytest.raises(error, match=f"^{name}"):
        MoeRunner(**(options | changes))


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "topk_weights", {"topk_weights": torch.zeros(13, 2, dtype=torch.int32)}),
        (ValueError, "topk_weights", {"topk_weights": torch.zeros(12, 2)}),
        (TypeError, "topk_ids", {"topk_ids": torch.zeros(13, 2)}),
        (ValueError, "topk_ids", {"topk_ids": torch.zeros(13, dtype=torch.int32)}),
        (ValueError, "hidden_states", {"hidden_states": torch.zeros(13, 2, 24)}),
        (ValueError, "token_lora_mapping", {"token_lora_mapping": torch.zeros(12, dtype=torch.int32)}),
    ],
)
@pytest.mark.parametrize("build", [around_callables, around_weights])
def test_bad_inputs_are_named(build: Any, error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    """The error's first word is the argument to blame."""
    inputs = BY_NAME["plain"].make()
    with pytest.raises(error, match=f"^{name}"):
        run(build(inputs), inputs.replace(**changes))


def test_what_the_callables_return_is_checked() -> None:
    """Shape and dtype, by the name of the callable; a router weight on the input needs K = 1."""
    inputs = BY_NAME["plain"].make()
    good = Gemm(inputs.w13, None, None), Gemm(inputs.w2, None, None)
    options: dict[str, Any] = {"num_experts": 8, "lora": pool_layer(inputs)}
    flat = MoeRunner(lambda x, ids: good[0](x, ids).flatten(0, 1), good[1], **options)
    with pytest.raises(ValueError, match="the result of base_gate_up must have shape"):
        run(flat, inputs)
    half = MoeRunner(good[0], lambda h, ids: good[1](h, ids).half(), **options)
    with pytest.raises(TypeError, match="the result of base_down must have dtype float32"):
        run(half, inputs)
    for lora in (None, options["lora"]):  # the width too: extra columns would pass for a wider layer
        wide = MoeRunner(good[0], lambda h, ids: torch.cat([good[1](h, ids)] * 2, -1), num_experts=8, lora=lora)
        with pytest.raises(ValueError, match=r"the result of base_down dim 2 \(H\) must be 48, got 96"):
            run(wide, inputs)
        odd = MoeRunner(lambda x, ids: good[0](x, ids)[..., :-1].contiguous(), good[1], num_experts=8, lora=lora)
        with pytest.raises(ValueError, match=r"the result of base_gate_up dim 2 \(S \* I\) must be"):
            run(odd, inputs)
    with pytest.raises(ValueError, match="topk_ids dim 1 must be 1"):
        run(MoeRunner(*good, apply_router_weight_on_input=True, **options), inputs)
