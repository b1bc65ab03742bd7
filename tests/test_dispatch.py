"""The C++ kernels' own look at their arguments: never more lenient than Python's check, and seldom in need of it."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import moelora_ops
from moelora_ops import meta
from moelora_ops.kernels import native
from moelora_ops.testing.cases import CASES, Case

pytestmark = pytest.mark.skipif(native.CPU_MISSING != "", reason=f"_C_cpu: {native.CPU_MISSING}")

_SPEC = importlib.util.spec_from_file_location("bad_input_of_dispatch", Path(__file__).parent / "test_bad_input.py")
assert _SPEC is not None and _SPEC.loader is not None
bad_input = sys.modules["bad_input_of_dispatch"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bad_input)

CONTRACTS = {contract.NAME: contract for contract in meta.OPS}
MODES: list[Callable[[], Any]] = [torch.enable_grad, torch.no_grad, torch.inference_mode]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool)


def changed(value: Any, rng: random.Random) -> Any:
    """Something else in place of an argument, often wrong."""
    if isinstance(value, list):
        value = [changed(t, rng) if rng.random() < 0.5 else t for t in value]
        return value[: rng.choice([0, 1, 1, 2])] if rng.random() < 0.2 else value
    if isinstance(value, Tensor):
        dim = rng.randrange(value.dim()) if value.dim() else 0
        return rng.choice([
            lambda: value.to(rng.choice(DTYPES)), lambda: value[None], lambda: value[0], lambda: value.narrow(dim, 0, 0),
            lambda: value.narrow(dim, 0, 1), lambda: value.narrow(dim, 0, value.shape[dim] - 1),
            lambda: value.narrow(dim, 0, 1).expand(value.shape), lambda: torch.cat([value, value], dim),
            lambda: value.transpose(-1, dim), lambda: value.repeat_interleave(2, dim=-1)[..., ::2],
            lambda: torch.cat([value, value], -1)[..., : value.shape[-1]], lambda: value.transpose(-1, dim).contiguous(),
        ])()  # fmt: skip
    if isinstance(value, str):
        return rng.choice(["gelu", "swigluoai", "relu2", "tanh", ""])
    if isinstance(value, bool):
        return not value
    return rng.choice([-1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**40]) if isinstance(value, int) else rng.choice([0.0, -1.0, 2.5])


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[type, str] | None:
    try:
        call(**arguments)
    except Exception as error:  # noqa: BLE001, the comparison is of any
        return type(error), str(error)
    return None


@pytest.mark.parametrize("name", CONTRACTS)
def test_lets_through_what_the_check_does(name: str) -> None:
    """Of arguments with random changes the op serves those that pass the check, and has its error for all others."""
    rng, served, refused = random.Random(name), 0, 0
    for _ in range(1500):
        arguments = bad_input.VALID[name]()
        for key in rng.sample(sorted(arguments), rng.choice([1, 1, 1, 2, 3])):
            arguments[key] = None if rng.random() < 0.2 and isinstance(arguments[key], Tensor) else changed(arguments[key], rng)
        if name == "moe_lora_align_block_size" and arguments["max_loras"] * arguments["block_size"] > 2**24:
            continue  # memory, if it is served
        want = outcome(CONTRACTS[name].check, arguments)
        assert outcome(getattr(torch.ops.moelora, name), arguments) == want, arguments
        served, refused = served + (want is None), refused + (want is not None)
    assert served > 100 and refused > 300


def delta_of_width(slices: int, width: int) -> dict[str, Any]:
    """Slices that are `width` columns of one element."""
    a, b = [torch.randn(1, 1, 1, 8)] * slices, [torch.randn(1, 1, 1, 1).expand(1, 1, width, 1)] * slices
    tables = dict(
        sorted_token_ids=bad_input.ids(1, 20), expert_ids=bad_input.ids(1, 5), num_tokens_post_padded=bad_input.ids(1)
    )
    return bad_input.delta_arguments() | tables | dict(lora_a_stacked=a, lora_b_stacked=b, lora_ranks=None)


def delta_without_columns(token_stride: int, choice_stride: int) -> dict[str, Any]:
    output = torch.empty(0).as_strided((5, 2, 0), (token_stride, choice_stride, 1))
    return delta_of_width(1, 0) | dict(output=output, offset=0)


def experts_of(count: int) -> dict[str, Any]:
    """`count` experts that are one."""
    experts, names = bad_input.experts_arguments(), ("w13", "w2", "w13_bias", "w2_bias")
    none = dict.fromkeys(("lora_a13", "lora_b13", "lora_a2", "lora_b2", "lora_ranks", "adapter_enabled"))
    return experts | {n: experts[n][:1].expand(count, *experts[n].shape[1:]) for n in names} | none


def experts_of_slots(count: int) -> dict[str, Any]:
    experts, names = bad_input.experts_arguments(), ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    none = dict.fromkeys(("lora_ranks", "adapter_enabled"))
    return experts | {n: experts[n][:1].expand(count, *experts[n].shape[1:]) for n in names} | none


def delta_of_slots(count: int) -> dict[str, Any]:
    delta, tables = delta_of_width(1, 2), ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    stacked = {n: [t.expand(count, -1, -1, -1) for t in delta[n]] for n in ("lora_a_stacked", "lora_b_stacked")}
    return delta | stacked | {n: delta[n][:1].expand(count, *delta[n].shape[1:]) for n in tables}


HUGE: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "three slices, 2 columns in 64 bits": ("fused_moe_lora", lambda: delta_of_width(3, (2**64 + 2) // 3), "offset + slices"),
    "four slices, 0 columns in 64 bits": ("fused_moe_lora", lambda: delta_of_width(4, 2**62), "offset + slices"),
    "strides of no column": ("fused_moe_lora", lambda: delta_without_columns(2**62 - 1, 2**62), "must not overlap itself"),
    "slots": ("fused_moe_lora", lambda: delta_of_slots(2**31), "2147483647 slots"),
    "slots of the layer": (
        "fused_experts_lora",
        lambda: experts_of_slots(2**31),
        "lora_b13 must hold at most 2147483647 slots",
    ),
    "experts": ("fused_experts_lora", lambda: experts_of(2**31), "w2 must hold at most 2147483647 experts"),
}


@pytest.mark.parametrize("what", HUGE)
def test_sizes_that_wrap_around_are_refused(what: str) -> None:
    """Views of a single element have any size: products of sizes, and ids of 32 bits, must not become valid ones."""
    name, arguments, message = HUGE[what]
    got = outcome(getattr(torch.ops.moelora, name), arguments())
    assert got == outcome(CONTRACTS[name].check, arguments()) and got is not None and message in got[1]


def calls_of(case: Case) -> list[tuple[str, Any, dict[str, Any]]]:
    inputs = case.make()
    align, flags = inputs.align(8)
    aligned = moelora_ops.moe_lora_align_block_size(*align, **flags)
    output = torch.zeros(case.num_tokens, case.top_k, case.hidden_size)
    x = torch.zeros(case.num_pairs, case.intermediate_size)
    delta = (output, x, *inputs.down_lora(), inputs.topk_weights, *aligned)
    experts, options = inputs.experts()
    return [
        ("moe_lora_align_block_size", align, flags), ("fused_moe_lora", delta, {"lora_ranks": inputs.lora_ranks}),
        ("fused_experts_lora", experts, options),
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_calls_do_not_ask_python(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check, thirty microseconds of Python, runs for calls that may be wrong only."""
    calls = calls_of(case)
    for contract in meta.OPS:
        monkeypatch.setattr(contract, "check", lambda *a, **kw: pytest.fail("Python was asked"))
    for name, args, kwargs in calls:
        getattr(torch.ops.moelora, name)(*args, **kwargs)


@pytest.mark.parametrize("mode", MODES, ids=["grad", "no_grad", "inference"])
@pytest.mark.parametrize("name", CONTRACTS)
def test_errors_are_the_same_in_every_mode(name: str, mode: Callable[[], Any]) -> None:
    """Whether or not the autograd kernel stands between, for op and function."""
    *_, bad = (row for row in bad_input.ALL if row.op == name and "another device" not in row.what)
    with mode():
        arguments = bad.arguments()
        for call in (getattr(torch.ops.moelora, name), getattr(moelora_ops, name)):
            assert outcome(call, arguments) == (bad.error, bad.message)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_calls_leave_no_memory_behind() -> None:
    """Arguments of all kinds, a string among them, are freed; torch 2.13's own conversion keeps 32 bytes of each string."""
    _, (_, args, kwargs) = calls_of(Case("empty", num_tokens=0))[1:]
    with torch.inference_mode():
        for calls in (20_000, 100_000):
            before = resident()
            for _ in range(calls):
                torch.ops.moelora.fused_experts_lora.default(*args, **kwargs | {"activation": "gelu"})
    assert resident() - before < 1_000_000


@pytest.mark.parametrize("name", CONTRACTS)
def test_refusals_leave_no_memory_behind(name: str) -> None:
    """Nor does the text of an error, on its way from Python through C++."""
    call = getattr(torch.ops.moelora, name).default
    bad = next(row for row in bad_input.ALL if row.op == name and row.error is ValueError)
    arguments = bad.arguments()
    with torch.inference_mode():
        for calls in (2_000, 20_000):
            before = resident()
            for _ in range(calls):
                assert outcome(call, arguments) is not None
    assert resident() - before < 60 * calls  # torch 2.13 itself keeps 38 where an argument is a string


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the ops that reach a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.name()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES, ids=["grad", "no_grad", "inference"])
def test_functions_show_the_op_to_modes(mode: Callable[[], Any]) -> None:
    """Passing the autograd kernel by passes nothing else by."""
    case = Case("seen")
    with mode():
        for name, args, kwargs in calls_of(case):
            with Seen() as seen:
                getattr(moelora_ops, name)(*args, **kwargs)
            assert seen.names.count(f"moelora::{name}") == 1 and not any("native" in seen_name for seen_name in seen.names)


def test_functions_pass_by_no_gradient() -> None:
    """What asks for a gradient or a tangent, by position, in a list or by name, still meets the autograd kernel."""
    _, (_, delta, _), (_, experts, options) = calls_of(Case("asked", bias=True))
    refused = "it serves inference only"
    for name in ("w13_bias", "w2_bias"):
        out = moelora_ops.fused_experts_lora(*experts, **options | {name: options[name].clone().requires_grad_()})
        with pytest.raises(NotImplementedError, match=refused):
            out.sum().backward()
    output = torch.zeros_like(delta[0])
    moelora_ops.fused_moe_lora(output, delta[1], [delta[2][0].clone().requires_grad_()], *delta[3:])
    with pytest.raises(NotImplementedError, match=refused):
        output.sum().backward()
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match=refused):
        moelora_ops.fused_experts_lora(forward_ad.make_dual(experts[0], experts[0].clone()), *experts[1:])
    with torch.no_grad(), pytest.raises(NotImplementedError, match=refused):
        torch.func.jvp(lambda x: moelora_ops.fused_experts_lora(x, *experts[1:]), (experts[0],), (experts[0],))
    with torch.no_grad(), pytest.raises(RuntimeError, match="an autograd.Function with functorch transforms"):  # it raises
        torch.func.grad(lambda x: moelora_ops.fused_experts_lora(x, *experts[1:]).sum())(experts[0])
