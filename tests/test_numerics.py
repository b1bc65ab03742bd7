"""The comparison that all value tests stand on must itself be able to fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moelora_ops.testing.numerics import OUTLIER, TOLERANCES, assert_close

BF16 = TOLERANCES[torch.bfloat16]


def values(**changes: float) -> Tensor:
    """10000 normal values, so that one of them hardly moves the rms; `at_5=30.0` sets the one at index 5."""
    out = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    for name, value in changes.items():
        out[int(name.removeprefix("at_"))] = value
    return out


def test_equal_values_pass() -> None:
    """A result passes against itself."""
    assert_close(values(), values(), BF16)


@pytest.mark.parametrize(
    "actual, expected",
    [
        (values() + 1.5 * BF16.rms, values()),  # everywhere a little
        (values(at_3=0.5 + 1.5 * BF16.max), values(at_3=0.5)),  # one element too far
        (values(at_3=torch.nan), values()),
        (values(at_3=torch.nan), values(at_3=torch.nan)),
        (values(at_3=torch.inf), values()),
        (values(at_3=30 * (1 + 1.5 * BF16.max / OUTLIER)), values(at_3=30.0)),  # an outlier, by its own size
        (-values(), values()),
        (torch.zeros(10000), values()),
    ],
    ids=["rms", "max", "nan", "nan-expected", "inf", "outlier", "sign", "zero"],
)
def test_errors_are_seen(actual: Tensor, expected: Tensor) -> None:
    """Every kind of error fails, and the message says where the worst one is."""
    with pytest.raises(AssertionError, match="worst at"):
        assert_close(actual, expected, BF16)


def test_an_outlier_is_judged_by_its_own_size() -> None:
    """Two ulp of a value of 30 deviations are no error, though a quarter of a deviation."""
    assert_close(values(at_3=30 * (1 + 2**-7)), values(at_3=30.0), BF16)
