"""Kernels bound once and launched often: the price of a launch is that of the C call, not of Triton's argument inspection.

`kernel[grid](...)` inspects every argument of every call: 70 us for thirty arguments. All of it but the pointers follows from
sizes and types, so a `Launch` compiles its kernel once for them and afterwards hands over addresses.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import triton
from torch import Tensor

from ._common import has_pdl


class Launch:
    """A Triton kernel with its grid, scalars and constants bound; called with its tensors, in order.

    The parameters of the kernel are ordered: tensors (or descriptors, or None), scalars, constants. Tensors of later calls have
    the dtypes of the first ones, and their alignment where the kernel specialises on it: whoever keeps a `Launch` keys it so.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Sequence[Any],
        scalars: Sequence[Any],
        constants: dict[str, Any],
        *,
        device: torch.device,
        num_warps: int,
        num_stages: int = 2,
    ) -> None:
        self._kernel, self._grid, self._scalars, self._constants = kernel, (*grid, 1, 1)[:3], tuple(scalars), constants
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if has_pdl(device):
            self._options["launch_pdl"] = True
        self._compiled: Any = None
        if isinstance(kernel, triton.JITFunction) and 0 not in self._grid:
            tail = kernel.arg_names[len(tensors) + len(scalars) :]
            assert set(tail) == set(constants), f"{tail} against {sorted(constants)}"
            compiled = kernel.warmup(*tensors, *scalars, grid=self._grid, **constants, **self._options)
            self._compiled = compiled.result() if hasattr(compiled, "result") else compiled
            self._tail = (*self._scalars, *(constants[name] for name in tail))

    def __call__(self, stream: int, *tensors: Any) -> None:
        if self._compiled is not None:
            k = self._compiled
            addresses = [t.data_ptr() if isinstance(t, Tensor) else t for t in tensors]
            k.run(*self._grid, stream, k.function, k.packed_metadata, None, None, None, *addresses, *self._tail)
        elif 0 not in self._grid:  # the interpreter
            self._kernel[self._grid](*tensors, *self._scalars, **self._constants, **self._options)


def current_stream(device: torch.device) -> int:
    """Handle of the device's current stream; 0 in the interpreter."""
    return int(triton.runtime.driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0
