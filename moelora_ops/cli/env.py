"""Print versions, and which backend serves which op here and why the others do not. Paste it into bug reports."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Sequence

import torch

from .. import __version__, meta
from ..kernels import native

NAME = "env"
HELP = "versions, and which backend serves which op"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`moelora env` takes no options."""


def run(options: argparse.Namespace) -> int:
    print(report())
    return 0


def report() -> str:
    """The text of `moelora env`."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    lines = [
        *_table(
            [
                ("moelora_ops", __version__),
                ("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
                ("torch", torch.__version__),
                ("triton", _version("triton")),
                ("safetensors", _version("safetensors")),
                ("CUDA", torch.version.cuda or "none: this torch has no CUDA"),
                ("GPU", ", ".join(devices) or "none"),
                ("threads", str(torch.get_num_threads())),
            ]
        ),
        "",
        *_table([("op", "on CPU", "on CUDA")] + [(op.NAME, cpu_backend(op.NAME), cuda_backend(op.NAME)) for op in meta.OPS]),
    ]
    return "\n".join(lines)


def cpu_backend(name: str) -> str:
    """What serves an op on CPU tensors, and why not the compiled kernel."""
    if native.op(name, "cpu") is not None:
        return "compiled C++"
    return f"PyTorch reference (compiled C++: {native.CPU_MISSING or 'this op is not in it'})"


def cuda_backend(name: str) -> str:
    """What serves an op on CUDA tensors, and why not another."""
    if not torch.cuda.is_available():
        return "nothing (this torch has no CUDA)" if torch.version.cuda is None else "nothing (torch sees no GPU)"
    if native.op(name, "cuda") is not None:
        return "CUDA C++"
    why = native.CUDA_MISSING or "this op is not in it"
    if importlib.util.find_spec("triton") is None:
        return f"nothing (Triton: not installed; CUDA C++: {why})"
    return f"Triton (CUDA C++: {why})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
