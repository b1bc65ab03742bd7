"""The files of an adapter: where they are, and safetensors read with every fault as an `AdapterError`."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..checks import short
from ..errors import AdapterError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def find(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The weight file and the config beside it; `path` is a folder or the weight file itself.

    Raises: AdapterError for a missing file, and for pickles, which are not opened.
    """
    try:
        weights = Path(path)
    except TypeError as error:
        raise AdapterError(f"path must be a folder or a file, got {type(path).__name__}") from error
    if weights.is_dir():
        pickled = weights / "adapter_model.bin"
        weights = weights / WEIGHTS
        if not weights.exists() and pickled.exists():
            raise AdapterError(f"{pickled} is a pickle: save the adapter as {WEIGHTS}")
    if weights.suffix != ".safetensors":
        raise AdapterError(f"path must be a folder or a .safetensors file, got {weights}")
    if not weights.is_file():
        raise AdapterError(f"path must hold {weights.name}, got no such file in {weights.parent}")
    return weights, weights.parent / CONFIG


class TensorFile:
    """A safetensors file, read tensor by tensor.

    Raises: AdapterError where the file is truncated, overlapping, oversized or no safetensors file at all.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path, self._fault = path, SafetensorError
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            self._file, self.names = file, sorted(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise AdapterError(f"{path.name} must be a whole safetensors file, got: {error}") from error

    def __enter__(self) -> TensorFile:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.__exit__(kind, error, trace)

    def read(self, name: str) -> Tensor:
        """One tensor, finite and of a float dtype, in memory of its own."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (self._fault, OSError, ValueError) as error:
            raise AdapterError(f"{name} must be readable from {self._path.name}, got: {error}") from error
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{name} must have dtype {short(_DTYPES)}, got {short([tensor.dtype])}")
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{name} must be finite, got infinite or NaN values")
        return tensor.clone()  # the file may be mapped: later changes on disk must not reach the adapter
