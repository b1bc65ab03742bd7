"""The compiled extensions, each optional: `_C_cpu` (C++) and `_C_cuda` (CUDA C++).

`_C_cpu` registers the CPU kernels of the public ops, which look at their arguments themselves and, unless they are surely
right, ask the ops `objection_*` below for the error. The same kernels, and those of `_C_cuda`, which check nothing, are ops of
the private namespace `moelora_native`, for Python functions that stand between the dispatcher and a kernel. Without a compiler
at install time CPU tensors are served by `reference`; without nvcc the CUDA ops are all Triton.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from .. import meta
from ..routing import RoutingSizes

_LIBRARY = torch.library.Library("moelora_native", "FRAGMENT")


def _objection(contract: Any) -> Callable[..., str]:
    """`check` of a contract as an op for C++, through which no Python exception passes.

    It returns "V" (ValueError) or "T" (TypeError) and the text of the error, or nothing where there is none.
    """

    def objection(*args: Any, **kwargs: Any) -> str:
        try:
            contract.check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__[0]}{error}"
        return ""

    return objection


for _op in meta.OPS:
    _LIBRARY.define(_op.SCHEMA)
    _arguments = _op.SCHEMA.partition("(")[2].rpartition(" -> ")[0].replace("(a!)", "")
    _LIBRARY.define(f"objection_{_op.NAME}({_arguments} -> str")
    _LIBRARY.impl(f"objection_{_op.NAME}", _objection(_op), "CompositeExplicitAutograd")


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


def runtime_libraries() -> list[Path]:
    """What a process without Python loads before a model package with our ops: schemas, then CPU kernels (docs/export.md).

    Raises: FileNotFoundError where one was not built.
    """
    found = [(name, _find(name)) for name in ("_C_schemas", "_C_cpu")]
    for name, files in found:
        if not files:
            raise FileNotFoundError(f"{name} was not built (no compiler at install time)")
    return [files[0] for _, files in found]


def _load_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch has no CUDA"  # the library's symbols would not resolve
    return _load("_C_cuda")


CPU_MISSING: str = _load("_C_cpu")
CUDA_MISSING: str = _load_cuda()


def _entry(name: str, *argument_types: Any) -> Any:
    """A C function of `_C_cuda` that returns an int; None where the extension does not serve."""
    if CUDA_MISSING:
        return None
    entry = getattr(ctypes.CDLL(str(_find("_C_cuda")[0])), name)
    entry.argtypes, entry.restype = argument_types, ctypes.c_int
    return entry


_ROUTE = _entry("moelora_route", ctypes.c_char_p, ctypes.c_void_p)  # csrc/cuda/route.h
_EXECUTE = _entry("moelora_execute", ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)  # csrc/cuda/execute.cu
_HAS_PARAMETERS = _entry("moelora_has_parameters", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)
_ROUTE_ARGS = struct.Struct("6Q12i")  # six addresses, twelve ints
_NOT_SERVED = -1
VALUE, ADDRESS, TENSOR_MAP = range(3)  # kinds of parameters in a program, see csrc/cuda/execute.cu


def execute(program: bytes, addresses: bytes, stream: int) -> bool:
    """Launch every kernel of a program on a stream of the current device; False, and nothing done, where that is not served.

    Args: program, addresses: 64-bit words, see csrc/cuda/execute.cu.
    Raises: RuntimeError where CUDA refuses a launch.
    """
    error: int = _EXECUTE(program, len(program) // 8, addresses, stream)
    if error > 0:
        raise RuntimeError(f"a kernel could not be launched: CUDA error {error}")
    return error == 0


def has_parameters(function: int, sizes: Sequence[int]) -> bool:
    """Whether a loaded kernel has exactly these parameters (bytes of each); False where nobody can tell."""
    return _HAS_PARAMETERS is not None and _HAS_PARAMETERS(function, struct.pack(f"={len(sizes)}Q", *sizes), len(sizes)) == 1


def launch_words(
    function: int, grid: Sequence[int], threads: int, shared: int, dependent: int, parameters: Sequence[Sequence[int]]
) -> list[int]:
    """One launch of a program: function handle, grid, threads of a block, bytes of shared memory, dependent launch."""
    words = [word for parameter in parameters for word in parameter]
    return [function, *grid, threads, shared, dependent, len(parameters), *words]


def route_words(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    slots: Sequence[Sequence[int] | None],
    sizes: RoutingSizes,
    *,
    dependent: bool,
) -> list[int]:
    """`route` as part of a program; `slots` are those of its five inputs and the tables, in order, None where there is none."""
    numbers = _route_numbers(topk_ids, token_lora_mapping, adapter_enabled, expert_map, sizes, dependent)
    ids, mapping, ranks, enabled, experts, tables = ([VALUE, 0] if slot is None else [ADDRESS, *slot] for slot in slots)
    parameters = [ids, mapping, enabled, experts, ranks, tables, *([VALUE, n] for n in numbers)]
    return launch_words(0, (1, 1, 1), 0, 0, 0, parameters)


def _route_numbers(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    sizes: RoutingSizes,
    dependent: bool,
) -> tuple[int, ...]:
    """The ints of RouteArgs in csrc/cuda/route.h."""
    flags = 16 * dependent + (topk_ids.itemsize == 8) + 2 * (token_lora_mapping.itemsize == 8)
    num_global_experts = sizes.num_experts
    if adapter_enabled is not None:
        flags += 4 * (adapter_enabled.itemsize == 4)
    if expert_map is not None:
        num_global_experts = expert_map.shape[0]
        flags += 8 * (expert_map.itemsize == 8)
    return (
        sizes.num_pairs, topk_ids.shape[1], sizes.num_experts, num_global_experts, sizes.max_loras, sizes.rank_tiles,
        sizes.block_m, sizes.segment_m, sizes.num_expert_blocks, sizes.num_segment_blocks, sizes.num_tiles, flags,
    )  # fmt: skip


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
    pointers = (topk_ids, token_lora_mapping, adapter_enabled, expert_map, lora_ranks, tables)
    numbers = _route_numbers(topk_ids, token_lora_mapping, adapter_enabled, expert_map, sizes, dependent)
    args = _ROUTE_ARGS.pack(*(0 if t is None else t.data_ptr() for t in pointers), *numbers)
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
