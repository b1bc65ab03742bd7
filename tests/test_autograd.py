"""Inference only: backward through an op raises instead of losing a gradient, and everything else with gradients just works."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

import moelora_ops
from moelora_ops.testing.cases import Case, Inputs
from moelora_ops.testing.oracle import assert_bitwise

experts, delta = torch.ops.moelora.fused_experts_lora, torch.ops.moelora.fused_moe_lora
NO_BACKWARD = "moelora::{} has no backward: it serves inference only"
CASE = Case("grad", bias=True)
EXPERTS_ARGUMENTS = (
    *("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"),
    *("lora_a13", "lora_b13", "lora_a2", "lora_b2"),
)


def run_experts(inputs: Inputs) -> Tensor:
    args, kwargs = inputs.experts()
    result: Tensor = experts(*args, **kwargs)
    return result


def delta_arguments(inputs: Inputs) -> dict[str, Any]:
    a, b = inputs.gate_up_lora()
    args, kwargs = inputs.align(8)
    aligned = torch.ops.moelora.moe_lora_align_block_size(*args, **kwargs)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    tensors = dict(hidden_states=inputs.hidden_states, lora_a_stacked=a, lora_b_stacked=b, topk_weights=inputs.topk_weights)
    return {**tensors, **dict(zip(names, aligned)), "mul_routed_weight": True}


def run_delta(arguments: dict[str, Any], output: Tensor | None = None) -> Tensor:
    output = torch.zeros(13, 2, 80) if output is None else output
    delta(output, **arguments)
    return output


@pytest.mark.parametrize("name", EXPERTS_ARGUMENTS)
def test_backward_through_the_layer_raises(name: str) -> None:
    """Whichever tensor requires grad, keyword arguments included: forward has the same bits, backward names the op."""
    inputs = CASE.make()
    want = run_experts(inputs)
    getattr(inputs, name).requires_grad_()
    out = run_experts(inputs)
    assert out.requires_grad
    assert_bitwise(out.detach(), want)
    with pytest.raises(NotImplementedError, match=NO_BACKWARD.format("fused_experts_lora")):
        out.sum().backward()


@pytest.mark.parametrize("name", ["hidden_states", "lora_a_stacked", "lora_b_stacked", "topk_weights"])
def test_backward_through_the_delta_raises(name: str) -> None:
    """The output that was written requires grad afterwards, and its backward names the op."""
    arguments = delta_arguments(CASE.make())
    want = run_delta(arguments)
    value = arguments[name]
    arguments[name] = [value[0], value[1].requires_grad_()] if isinstance(value, list) else value.requires_grad_()
    out = run_delta(arguments)
    assert out.requires_grad
    assert_bitwise(out.detach(), want)
    with pytest.raises(NotImplementedError, match=NO_BACKWARD.format("fused_moe_lora")):
        out.sum().backward()


@pytest.mark.parametrize("view", [False, True])
def test_backward_through_a_base_under_the_delta_raises(view: bool) -> None:
    """Training a base GEMM whose output got a delta, whole or as a view of a larger buffer, does not silently drop it."""
    weight = torch.randn(80, 48, requires_grad=True)
    inputs = CASE.make()
    output = (inputs.hidden_states @ weight.T)[:, None].expand(-1, 2, -1).contiguous()
    if view:
        output = torch.cat([output, output], dim=0)[:13]
    run_delta(delta_arguments(inputs), output)
    with pytest.raises(NotImplementedError, match=NO_BACKWARD.format("fused_moe_lora")):
        output.sum().backward()
    assert weight.grad is None


CALLS = [delta, moelora_ops.fused_moe_lora]


@pytest.mark.parametrize("call", CALLS, ids=["op", "function"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=lambda m: m.__name__)
def test_a_write_is_one_for_autograd(call: Callable[..., Any], mode: Callable[[], Any]) -> None:
    """Whoever saved the output for a backward pass is told that it changed, as by PyTorch's own in-place ops."""
    arguments, output, weight = delta_arguments(CASE.make()), torch.randn(13, 2, 80), torch.randn(13, 2, 80).requires_grad_()
    product = (weight * output).sum()
    with mode():
        call(output, **arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def no_grad_view() -> Tensor:
    with torch.no_grad():
        return torch.randn(14, 2, 80)[:13]


READ_ONLY: dict[str, Callable[[], Tensor]] = {
    "leaf": lambda: torch.randn(13, 2, 80).requires_grad_(),
    "view of a leaf": lambda: torch.randn(14, 2, 80).requires_grad_()[:13],
    "one of several views": lambda: (torch.randn(3, 13, 2, 80).requires_grad_() * 2).unbind()[1],
    "view made without gradients": no_grad_view,
}


@pytest.mark.parametrize("call", CALLS, ids=["op", "function"])
@pytest.mark.parametrize("what", READ_ONLY)
def test_what_autograd_keeps_is_refused_before_it_is_written(what: str, call: Callable[..., Any]) -> None:
    """PyTorch's own error for an in-place op, and not one bit written."""
    arguments, output = delta_arguments(CASE.make()), READ_ONLY[what]()
    arguments["topk_weights"].requires_grad_()
    before = output.detach().clone()
    with pytest.raises(RuntimeError, match="is being modified inplace|in-place operation"):
        call(output, **arguments)
    assert_bitwise(output.detach(), before)


def test_refused_arguments_leave_the_graph_as_it_was() -> None:
    """An output that is not written does not come to require grad either."""
    arguments, output = delta_arguments(CASE.make()), torch.randn(13, 2, 80)
    arguments["topk_weights"].requires_grad_()
    with pytest.raises(ValueError, match="offset must be >= 0, got -1"):
        delta(output, **arguments, offset=-1)
    assert not output.requires_grad and output._version == 0


def test_forward_derivatives_raise() -> None:
    """Forward-mode AD would see a tangent of zeros; data without a tangent is served inside it."""
    inputs = CASE.make()
    want, arguments = run_experts(inputs), delta_arguments(inputs)
    with torch.autograd.forward_ad.dual_level():
        assert_bitwise(run_experts(inputs), want)
        x = torch.autograd.forward_ad.make_dual(inputs.hidden_states, torch.ones_like(inputs.hidden_states))
        with pytest.raises(NotImplementedError, match="moelora::fused_experts_lora has no forward derivative"):
            run_experts(inputs.replace(hidden_states=x))
        a = [torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in arguments["lora_a_stacked"]]
        with pytest.raises(NotImplementedError, match="moelora::fused_moe_lora has no forward derivative"):
            run_delta({**arguments, "lora_a_stacked": a})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_modes_without_gradients(mode: Callable[[], Any]) -> None:
    """Under no_grad and inference_mode tensors that require grad are data like any other."""
    inputs = CASE.make()
    want, want_delta = run_experts(inputs), run_delta(delta_arguments(inputs))
    inputs.hidden_states.requires_grad_()
    inputs.lora_b13.requires_grad_()
    with mode():
        got, got_delta = run_experts(inputs), run_delta(delta_arguments(inputs))
        made_inside = run_experts(CASE.make())
    for result, expected in ((got, want), (got_delta, want_delta), (made_inside, want)):
        assert not result.requires_grad
        assert_bitwise(result, expected)


def test_no_gradient_is_asked_of_other_graphs() -> None:
    """A detached result leaves the rest of a training graph alone."""
    inputs = CASE.make()
    inputs.hidden_states.requires_grad_()
    head = torch.randn(48, requires_grad=True)
    (run_experts(inputs).detach() @ head).sum().backward()
    assert head.grad is not None and inputs.hidden_states.grad is None


@pytest.mark.parametrize("op", ["fused_experts_lora", "fused_moe_lora"])
def test_compiled_forward_works_and_backward_raises(op: str) -> None:
    """torch.compile with inputs that require grad gives the eager bits; only running the backward raises."""
    inputs = CASE.make()
    arguments = delta_arguments(inputs)

    def layer(x: Tensor) -> Tensor:
        if op == "fused_experts_lora":
            return run_experts(inputs.replace(hidden_states=x)) * 2
        return run_delta({**arguments, "hidden_states": x}) * 2

    want = layer(inputs.hidden_states)
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(inputs.hidden_states.clone().requires_grad_())
    assert_bitwise(out.detach(), want)
    with pytest.raises(NotImplementedError, match=NO_BACKWARD.format(op)):
        out.sum().backward()


def test_alignment_has_integers_only() -> None:
    """The align op has no gradient to lose."""
    args, kwargs = CASE.make().align()
    assert not any(t.requires_grad for t in torch.ops.moelora.moe_lora_align_block_size(*args, **kwargs))
