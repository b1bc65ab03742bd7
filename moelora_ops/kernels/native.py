"""The compiled extensions, each optional: `_C_cpu` (C++) and `_C_cuda` (CUDA C++).

They register kernels for the ops of the private namespace `moelora_native`, which has the public schemas: the public ops check
their arguments and then call these. Without a compiler at install time CPU tensors are served by `reference`; without nvcc the
CUDA ops are all Triton.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import meta
from ..routing import RoutingSizes

_LIBRARY = torch.library.Library("moelora_native", "FRAGMENT")
for _op in meta.OPS:
    _LIBRARY.define(_op.SCHEMA)


def _find(name: str) -> list[Path]:
    """The extension's file beside the package, or nothing."""
    folder = Path(__file__).resolve().parent.parent
    return sorted(folder.glob(f"{name}*.so")) + sorted(folder.glob(f"{name}*.pyd"))


def _load(name: str) -> str:
    """Load `name` from beside the package; returns "" when it serves, else the reason why not."""
    disabled = os.environ.get("MOELORA_DISABLE_NATIVE", "")
    if disabled not in ("", "0"):
        return "switched off by MOELORA_DISABLE_NATIVE"
    found = _find(name)
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


def _route_entry() -> Any:
    """The C function `moelora_route(const RouteArgs*, stream)` of csrc/cuda/route.cu; None where `_C_cuda` does not serve."""
    if CUDA_MISSING:
        return None
    entry = ctypes.CDLL(str(_find("_C_cuda")[0])).moelora_route
    entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_int
    return entry


_ROUTE = _route_entry()
_ROUTE_ARGS = struct.Struct("6Q12i")  # six addresses, twelve ints
_NOT_SERVED = -1


def route(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_ranks: Tensor | None,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    tables: Tensor,
    sizes: RoutingSizes,
    *,
    dependent: bool,
) -> bool:
    """Fill the tables of a routing in one launch; False, and nothing done, where this device or these sizes are not served.

    Arguments are those of the layer op's route, contiguous and of at least one pair. Launches on the current stream of the
    device of `topk_ids`, which is the current device; `dependent`: by programmatic dependent launch.

    Raises: RuntimeError where CUDA refuses the launch.
    """
    if _ROUTE is None or not topk_ids.is_cuda:
        return False
    flags = 16 * dependent + (topk_ids.itemsize == 8) + 2 * (token_lora_mapping.itemsize == 8)
    enabled_ptr = map_ptr = 0
    num_global_experts = sizes.num_experts
    if adapter_enabled is not None:
        enabled_ptr = adapter_enabled.data_ptr()
        flags += 4 * (adapter_enabled.itemsize == 4)
    if expert_map is not None:
        map_ptr, num_global_experts = expert_map.data_ptr(), expert_map.shape[0]
        flags += 8 * (expert_map.itemsize == 8)
    args = _ROUTE_ARGS.pack(
        topk_ids.data_ptr(), token_lora_mapping.data_ptr(), enabled_ptr, map_ptr,
        0 if lora_ranks is None else lora_ranks.data_ptr(), tables.data_ptr(),
        sizes.num_pairs, topk_ids.shape[1], sizes.num_experts, num_global_experts, sizes.max_loras, sizes.rank_tiles,
        sizes.block_m, sizes.segment_m, sizes.num_expert_blocks, sizes.num_segment_blocks, sizes.num_tiles, flags,
    )  # fmt: skip
    error: int = _ROUTE(args, torch._C._cuda_getCurrentRawStream(topk_ids.get_device()))
    if error > 0:
        raise RuntimeError(f"route could not be launched: CUDA error {error}")
    return error != _NOT_SERVED


def op(name: str, device_type: str) -> Any:
    """The compiled kernel of an op for a device type, or None where there is none."""
    if (CUDA_MISSING if device_type == "cuda" else CPU_MISSING) != "":
        return None
    key = device_type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"moelora_native::{name}", key):
        return None
    return getattr(torch.ops.moelora_native, name).default
