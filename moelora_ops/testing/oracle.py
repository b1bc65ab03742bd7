"""The reference in fp64, and the comparison that looks at the delta alone."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .. import reference
from .cases import Call, Inputs
from .numerics import TOLERANCES, assert_close


class WeakSignal(AssertionError):
    """The expected delta drowns in the rounding of the base: these inputs test nothing."""


def upcast(value: Any) -> Any:
    """Floating-point tensors in fp64, inside lists, tuples and dicts too; everything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(upcast(v) for v in value)
    return {k: upcast(v) for k, v in value.items()} if isinstance(value, dict) else value


def exact(function: Callable[..., Any], call: Call) -> Any:
    """A function of `reference` on the same values in fp64."""
    args, kwargs = call
    return function(*upcast(args), **upcast(kwargs))


def exact_experts(inputs: Inputs, *, adapters: bool = True) -> Tensor:
    result: Tensor = exact(reference.fused_experts_lora, inputs.experts(adapters=adapters))
    return result


def assert_delta_close(
    actual: Tensor, actual_base: Tensor, expected: Tensor, expected_base: Tensor, what: str = "delta"
) -> None:
    """Fail unless `actual - actual_base` is the expected delta, relative to the delta itself.

    Rows whose expected delta is zero must equal the base in every bit. Where one rounding of
    the base would be nearly as large as the error allowed to the delta, `WeakSignal` is raised.
    """
    dtype, delta = actual.dtype, expected - expected_base
    touched = delta.ne(0).any(-1)
    assert_bitwise(actual[~touched], actual_base[~touched], f"{what}, rows without adapter")
    delta = delta[touched]
    if delta.numel() == 0:
        return
    signal, rounding = _rms(delta), 0.5 * torch.finfo(dtype).eps * _rms(expected_base[touched])
    room = 1.0 if delta.numel() >= 64 else 0.75  # the rms of a dozen roundings scatters by a quarter
    if rounding > room * TOLERANCES[dtype].rms * signal:
        raise WeakSignal(f"{what} is too small to be judged: rms {signal:.2e}, a rounding of the base {rounding:.2e}")
    got = actual[touched].double() - actual_base[touched].double()
    assert_close(got, delta, TOLERANCES[dtype], what=what)


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Fail unless the two have the same bits (NaN included)."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, f"{what}: {actual.shape} {actual.dtype}"
    left, right = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (actual, expected))
    different = left.ne(right).nonzero()
    assert len(different) == 0, f"{what}: {len(different)} bytes of {list(left.shape)} differ, first {different[0].tolist()}"


def _rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()
