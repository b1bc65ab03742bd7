"""The compiled extensions, each optional: `_C_cpu` (C++) and `_C_cuda` (CUDA C++).

They register kernels for the ops of the private namespace `moelora_native`, which has the public schemas: the public ops check
their arguments and then call these. Without a compiler at install time CPU tensors are served by `reference`; without nvcc the
CUDA ops are all Triton.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .. import meta

_LIBRARY = torch.library.Library("moelora_native", "FRAGMENT")
for _op in meta.OPS:
    _LIBRARY.define(_op.SCHEMA)


def _load(name: str) -> str:
    """Load `name` from beside the package; returns "" when it serves, else the reason why not."""
    disabled = os.environ.get("MOELORA_DISABLE_NATIVE", "")
    if disabled not in ("", "0"):
        return "switched off by MOELORA_DISABLE_NATIVE"
    folder = Path(__file__).resolve().parent.parent
    found = sorted(folder.glob(f"{name}*.so")) + sorted(folder.glob(f"{name}*.pyd"))
    if not found:
        return "not built (no compiler at install time)"
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return f"failed to load: {error}"
    return ""


def _load_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch has no CUDA"  # the library's symbols would not resolve
    return _load("_C_cuda")


CPU_MISSING: str = _load("_C_cpu")
CUDA_MISSING: str = _load_cuda()


def op(name: str, device_type: str) -> Any:
    """The compiled kernel of an op for a device type, or None where there is none."""
    if (CUDA_MISSING if device_type == "cuda" else CPU_MISSING) != "":
        return None
    key = device_type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moelora_native::{name}", key):
        return None
    return getattr(torch.ops.moelora_native, name).default
