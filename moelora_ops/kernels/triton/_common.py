"""What every Triton stage needs: programmatic dependent launch, and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def gdc_wait(USE_PDL: tl.constexpr):
    """Wait until the kernel before this one is complete and its writes are visible.

    Every program calls this first, before any read, write or early exit: the wait covers only the direct predecessor, so the
    kernels further back are complete only because the predecessor itself waited in every program.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch(USE_PDL: tl.constexpr):
    """Let the next kernel start; only after `gdc_wait`, else the kernel after next could overtake the one before this."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options for programmatic dependent launch: empty where the device (or the interpreter) has none."""
    if device.type != "cuda" or torch.version.cuda is None or not isinstance(gdc_wait, triton.JITFunction):
        return {}
    return {"launch_pdl": True} if torch.cuda.get_device_capability(device) >= (9, 0) else {}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current for launches; CPU tensors are for the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
