"""Calls like an earlier one go unchecked: whatever the checks look at tells calls apart, and errors stay what they were."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops.kernels.triton import experts
from moelora_ops.kernels.triton.call import TENSORS, key_of
from moelora_ops.meta import fused_experts_lora as contract
from moelora_ops.ops.fused_experts_lora import _cuda
from moelora_ops.testing.oracle import assert_bitwise

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_launch.py has the same on CUDA tensors")

_SPEC = importlib.util.spec_from_file_location("bad_input", Path(__file__).parent / "test_bad_input.py")
assert _SPEC is not None and _SPEC.loader is not None
bad_input = sys.modules["bad_input"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bad_input)

# Device type "meta" has CPU's number of a device; CUDA's differ, and tests/gpu has them.
BAD = [bad for bad in bad_input.ALL if bad.op == contract.NAME and "another device" not in bad.what]


def split(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """As the dispatcher hands arguments to a kernel: the positional ones of the schema, then the others by name."""
    arguments = dict(arguments)
    return [arguments.pop(name) for name in TENSORS[:10]], arguments


def key(**changes: Any) -> tuple[Any, ...]:
    args, kwargs = split({**bad_input.experts_arguments(), **changes})
    return key_of(args, kwargs)[0]


def test_key_is_the_same_for_tensors_of_the_same_kind() -> None:
    """Values and addresses are not in it; the addresses come beside it, in order, 0 for None."""
    assert key() == key() and hash(key()) == hash(key())
    arguments = {**bad_input.experts_arguments(), "lora_a2": None, "expert_map": None}
    args, kwargs = split(arguments)
    addresses = [0 if arguments[name] is None else arguments[name].data_ptr() for name in TENSORS]
    assert key_of(args, kwargs)[1] == addresses
    kwargs = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
    assert key_of(args, kwargs)[1] == addresses


class Elsewhere:
    """A tensor on another device."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.stride, self.data_ptr = tensor.shape, tensor.dtype, tensor.stride, tensor.data_ptr
        self.is_contiguous = tensor.is_contiguous

    def get_device(self) -> int:
        return 1


def shifted(tensor: Tensor) -> Tensor:
    """The same tensor, not aligned to 16 bytes."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return buffer[1:].view(tensor.shape)


@pytest.mark.parametrize("name", TENSORS)
def test_key_has_whatever_the_checks_look_at(name: str) -> None:
    """Each tensor's dtype, shape, strides, alignment, device, and whether it is there."""
    tensor = bad_input.experts_arguments()[name]
    last = tensor.dim() - 1
    changed = {
        "dtype": tensor.to(torch.float16),
        "shape": torch.cat([tensor, tensor]),
        "dimensions": tensor[None],
        "stride": torch.cat([tensor, tensor], dim=last).narrow(last, 0, tensor.shape[last])
        if last
        else tensor.repeat_interleave(2)[::2],
        "alignment": shifted(tensor),
        "device": Elsewhere(tensor),
        "presence": None,
    }
    keys = {what: key(**{name: value}) for what, value in changed.items()}
    keys["nothing"] = key()
    assert len(set(keys.values())) == len(keys), name


@pytest.mark.parametrize(
    "name, value",
    [
        *(("activation", "gelu"), ("gated", False), ("interleaved", True), ("swiglu_alpha", 1.6), ("swiglu_limit", 6.0)),
        *(("swiglu_limit", None), ("apply_router_weight_on_input", True), ("routed_scaling_factor", 2.0)),
    ],
)
def test_key_has_every_option(name: str, value: Any) -> None:
    assert key(**{name: value}) != key()


def test_key_has_every_argument_of_the_op() -> None:
    """The two tests above leave none out."""
    schema = torch.ops.moelora.fused_experts_lora.default._schema
    options = ("activation", "gated", "interleaved", "swiglu_alpha", "swiglu_limit")
    options += ("apply_router_weight_on_input", "routed_scaling_factor")
    assert tuple(argument.name for argument in schema.arguments) == TENSORS + options


def test_a_known_call_is_not_checked_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call like a first one has its result without the checks, the first has them."""
    monkeypatch.setattr(experts, "_PLANS", {})
    args, kwargs = split(bad_input.experts_arguments())
    checks = []
    check = contract.check
    monkeypatch.setattr(contract, "check", lambda *a, **kw: checks.append(check(*a, **kw)))
    first, second = _cuda(*args, **kwargs), _cuda(*args, **kwargs)
    assert len(checks) == 1
    assert_bitwise(second, first)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments_raise_after_a_good_call(bad: Any) -> None:
    """One change to arguments that were served before still gets the error of the checks."""
    args, kwargs = split(bad_input.experts_arguments())
    _cuda(*args, **kwargs)
    args, kwargs = split(bad.arguments())
    error = bad_input.error_of(lambda **_: _cuda(*args, **kwargs), {})
    assert (type(error), str(error)) == (bad.error, bad.message)
