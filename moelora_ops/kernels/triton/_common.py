"""What every Triton stage needs: programmatic dependent launch, and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def gdc_wait(USE_PDL: tl.constexpr):
    """Wait until the kernel before this one is complete and its writes are visible.

    The wait covers only the direct predecessor. A kernel that waits before it triggers (`gdc_launch`) vouches for everything
    further back: its successor may read, before its own wait, what older kernels wrote. Nobody writes before its wait.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch(USE_PDL: tl.constexpr):
    """Let the next kernel start; only after `gdc_wait`, else the kernel after next could overtake the one before this."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache(maxsize=None)
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on this device are launched with programmatic dependent launch (not in the interpreter)."""
    if device.type != "cuda" or torch.version.cuda is None or not isinstance(gdc_wait, triton.JITFunction):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=None)
def has_copy_engine(device: torch.device) -> bool:
    """Whether tensor descriptors are read by a copy engine on this device; the interpreter reads them as well."""
    return device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options for programmatic dependent launch: empty where the device (or the interpreter) has none."""
    return {"launch_pdl": True} if has_pdl(device) else {}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current for launches; CPU tensors are for the interpreter."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
