"""How far a result may be from the fp64 reference, and how to say so.

Errors are relative to the *delta* (or to the base where there is no adapter), not to the total: a plain allclose on the total
would pass with no adapter at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest and root-mean-square error, both relative to the root-mean-square of the expected values.

    Roundings are in proportion to the value, so an outlier, beyond OUTLIER times that root-mean-square, is judged by the
    largest error relative to |value| / OUTLIER: sums of few products (rank 1) have values of 15 deviations.
    """

    max: float
    rms: float


OUTLIER = 4

# One rounding of an output costs half an ulp (fp16 2^-11, bf16 2^-8 relative to the value). Two intermediates are rounded as
# well (the activation, each pair's row), errors of a few ulp add up as a random walk over top_k, and the largest of thousands
# of samples lies 4 to 5 deviations out. fp32 differs by summation order alone: about sqrt(K) * 2^-24 over K = 2048.
TOLERANCES = {
    torch.float32: Tolerance(max=5e-5, rms=5e-6),
    torch.float16: Tolerance(max=8e-3, rms=1e-3),
    torch.bfloat16: Tolerance(max=6e-2, rms=8e-3),
}


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, *, scale: Tensor | None = None, what: str = "result"
) -> None:
    """Fail unless `actual` is within `tolerance` of `expected`, relative to the RMS of `scale` (default: of `expected`).

    The message gives both errors and the worst coordinate with its values. NaN never passes.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    unit = (want if scale is None else scale.detach().cpu().double()).square().mean().sqrt().clamp(min=1e-30)
    error = (got - want).abs()
    error = torch.where(torch.isnan(error), torch.inf, error)
    relative = error / torch.maximum(unit, want.abs() / OUTLIER)
    worst, rms = relative.max().item(), (error / unit).square().mean().sqrt().item()
    if worst <= tolerance.max and rms <= tolerance.rms:
        return
    at = tuple(int(i) for i in torch.unravel_index(relative.argmax(), relative.shape))
    raise AssertionError(
        f"{what}: max error {worst:.2e} (allowed {tolerance.max:.0e}), rms {rms:.2e} (allowed {tolerance.rms:.0e}), "
        f"worst at {at}: got {got[at].item():.6g}, expected {want[at].item():.6g}"
    )
