"""The files of an adapter: where they are, and safetensors read into memory of their own, every fault an `AdapterError`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..checks import short
from ..errors import AdapterError

CONFIG, AUTOMODEL_CONFIG = "adapter_config.json", "automodel_peft_config.json"
# PEFT and all that write its names; MLX; the experts of KTransformers, beside PEFT's file or alone.
PEFT, MLX, KTRANSFORMERS = "adapter_model.safetensors", "adapters.safetensors", "fused_expert_lora.safetensors"
_SHARD = re.compile(r"adapter_model-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
_CONVERT = 'safetensors.torch.save_file(torch.load("{name}", weights_only=True), "' + PEFT + '")'
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_MAX_HEADER = 64 * 2**20  # bytes; 100,000 tensors need 18 MiB
_WEIGHTS = (".bin", ".pt", ".pth", ".npz", ".gguf", ".safetensors")
_MAX_JSON = 16 * 2**20
_MAX_NAME = 10_000  # characters of a tensor's name: messages carry it


def find(path: str | os.PathLike[str]) -> list[Path]:
    """The weight files of an adapter, all in one folder; `path` is the folder or one of them.

    Raises: AdapterError for a missing file, for pickles, which are not opened, and where it is not clear which file is meant.
    """
    try:
        folder = Path(path)
    except TypeError as error:
        raise AdapterError(f"path must be a folder or a file, got {type(path).__name__}") from error
    if not folder.is_dir():
        if not folder.exists():
            raise AdapterError(f"path must be a folder or a file, got {folder}, where there is none")
        if folder.suffix != ".safetensors":
            raise AdapterError(f"path must be a folder or a .safetensors file, got {folder}{_how_to_convert(folder.name)}")
        if not folder.is_file():
            raise AdapterError(f"path must hold {folder.name}, got no such file in {folder.parent}")
        if folder.name not in (PEFT, MLX, KTRANSFORMERS) and not _SHARD.fullmatch(folder.name):
            return [folder]
        folder = folder.parent  # half of an adapter may lie in the file beside it
    found = [folder / name for name in (PEFT, MLX, KTRANSFORMERS) if (folder / name).is_file()] or _shards(folder)
    if folder / MLX in found and len(found) > 1:
        raise AdapterError(f"path must hold one adapter, got {' and '.join(p.name for p in found)} in {folder}")
    if not found:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in _WEIGHTS)
        got = f"{', '.join(others[:4])}" if others else "no such file"
        why = next(filter(None, map(_how_to_convert, others)), "")
        inside = sorted(p.parent.name for name in (PEFT, MLX) for p in folder.glob(f"*/{name}"))
        why = why or (f"; meant may be {' or '.join(inside[:3])} inside it" if inside else "")
        raise AdapterError(f"path must hold {PEFT}, {MLX} or {KTRANSFORMERS}, got {got} in {folder}{why}")
    return found


def _shards(folder: Path) -> list[Path]:
    """adapter_model-00001-of-0000N.safetensors to the N-th; none where there is none."""
    found = {path: match for path in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(path.name)) and path.is_file()}
    if found:
        count = int(next(iter(found.values()))["count"])
        numbers = [int(match["number"]) for match in found.values() if int(match["count"]) == count]
        if numbers != list(range(1, count + 1)) or len(numbers) < len(found):
            raise AdapterError(
                f"path must hold all {count} shards of one adapter, got {', '.join(p.name for p in found)} in {folder}"
            )
    return list(found)


def _how_to_convert(name: str) -> str:
    suffix = Path(name).suffix
    if suffix in (".bin", ".pt", ".pth"):
        return f": {name} is a pickle and is not opened; convert it with {_CONVERT.format(name=name)}"
    if suffix in (".npz", ".gguf"):
        return f": {name} is no safetensors file; save the adapter as safetensors"
    return ""


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises: AdapterError where the file is missing, too large, is not JSON, gives a name twice, or is not an object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON + 1)
        if len(text) > _MAX_JSON:
            raise AdapterError(f"{what} {path.name} must have at most {_MAX_JSON} bytes, got more")
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise AdapterError(f"{what} must be a readable file {path.name}, got {error.strerror or error}") from error
    except AdapterError:
        raise
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{what} {path.name} must be JSON, got {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{what} {path.name} must be a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} twice")
    return result


# A header as the safetensors library writes it: found at once, where JSON takes a second for 37,000 tensors and their checks.
_METADATA = '{"__metadata__":'
_SIZE = "(?:0|[1-9][0-9]{0,17})"
_TENSOR = re.compile(
    rf'"([^"\\\x00-\x1f]{{1,{_MAX_NAME}}})":{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_SIZE}(?:,{_SIZE}){{0,7}})?)\],'
    rf'"data_offsets":\[({_SIZE}),({_SIZE})\]}},'
)
_MAX_PARTS = 1000  # of one system call; 1024 on Linux


class _Entry(NamedTuple):
    file: BinaryIO
    dtype: str
    shape: tuple[int, ...]
    begin: int  # of the bytes, from the start of the file
    end: int


class TensorFiles:
    """The tensors of one or several safetensors files, read one by one, without a mapping of the files.

    Raises: AdapterError where a file is truncated, overlapping, oversized or no safetensors file at all, or where two files
        have a tensor of the same name.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        self._files: list[BinaryIO] = []
        self.size = 0  # bytes of all files
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self.names = sorted(self._entries)

    def _open(self, path: Path) -> None:
        try:
            file = path.open("rb", buffering=0)
            self._files.append(file)
            size = os.fstat(file.fileno()).st_size
            entries = _parse(file, size)
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(f"{path.name} must be a whole safetensors file, got: {error}; copy it again") from error
        for name in entries.keys() & self._entries.keys():
            raise AdapterError(f"{name} must be in one file of the adapter, got it in two")
        self._entries |= entries
        self.size += size

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it; AdapterError unless it is a plain float type."""
        dtype = self._entries[name].dtype
        if dtype not in _DTYPES:
            raise AdapterError(
                f"{name} must have dtype {short(list(_DTYPES.values()))}, got {dtype} in the file: save it dequantized"
            )
        return _DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """One tensor, finite and of a float dtype, in memory of its own."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, tensor)
        check_finite(name, tensor)
        return tensor

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill a target of the tensor's shape; it is converted where the dtypes differ. Not checked for NaN."""
        entry, dtype = self._entries[name], self.dtype(name)
        direct = target if target.dtype == dtype and target.is_contiguous() else torch.empty(entry.shape, dtype=dtype)
        if direct.numel():
            view = memoryview(direct.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            try:
                entry.file.seek(entry.begin)
                done = 0
                while done < len(view):
                    count = entry.file.readinto(view[done:])  # type: ignore[attr-defined]
                    if not count:
                        raise AdapterError(f"{name} must be readable, got the end of the file")
                    done += count
            except OSError as error:
                raise AdapterError(f"{name} must be readable, got: {error}") from error
        if direct is not target:
            target.copy_(direct)

    def read_stacks(self, stacks: Iterable[tuple[list[str], Tensor]]) -> None:
        """Fill target[i], contiguous, with the i-th tensor of each stack, all of its dtype and row shape. Not checked for NaN.

        What lies side by side in the file is read by one system call, each tensor to its place: an adapter of 1.7 GB may have
        37,000 tensors of 24 to 64 KB.
        """
        parts: list[tuple[int, int, memoryview, str]] = []  # file, first byte, where to, name
        for names, target in stacks:
            row = target[0].numel() * target.element_size()
            if row:
                view = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                for start, name in zip(range(0, len(view), row), names):
                    entry = self._entries[name]
                    parts.append((entry.file.fileno(), entry.begin, view[start : start + row], name))
        parts.sort(key=lambda part: part[:2])
        first, end = 0, -1
        for i, (file, begin, view, _) in enumerate(parts):
            if begin != end or file != parts[first][0] or i - first == _MAX_PARTS:
                self._read_parts(parts[first:i])
                first = i
            end = begin + len(view)
        self._read_parts(parts[first:])

    def _read_parts(self, parts: list[tuple[int, int, memoryview, str]]) -> None:
        """Neighbours in a file."""
        if not parts:
            return
        (file, begin, _, name), views = parts[0], [part[2] for part in parts]
        missing = sum(map(len, views))
        try:
            while count := os.preadv(file, views, begin) if views else 0:
                begin, missing = begin + count, missing - count
                while views and count >= len(views[0]):  # a call may stop early, at 2 GB or at a signal
                    count -= len(views.pop(0))
                views[:1] = [views[0][count:]] if views else []
        except OSError as error:
            raise AdapterError(f"{name} must be readable, got: {error}") from error
        if missing:
            raise AdapterError(f"{parts[-len(views)][3]} must be readable, got the end of the file")


def check_finite(name: str, tensor: Tensor) -> None:
    """AdapterError for NaN and infinite values."""
    if not is_finite(tensor):
        raise AdapterError(f"{name} must be finite, got infinite or NaN values: its training diverged, or it is damaged")


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass, no temporary."""
    return tensor.numel() == 0 or all(math.isfinite(x) for x in torch.stack(torch.aminmax(tensor)).tolist())


def _parse(file: BinaryIO, size: int) -> dict[str, _Entry]:
    """The header of a safetensors file, whose tensors must lie side by side and fill the file.

    Layout: 8 bytes of little-endian header size n, n bytes of JSON, the data; offsets count from the data.
    """
    if size < 8:
        raise ValueError(f"{size} bytes, fewer than its first field has")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"a header of {length} bytes, where {min(size - 8, _MAX_HEADER)} are the most possible")
    header = b""
    while len(header) < length and (part := file.read(length - len(header))):
        header += part
    text = header.decode("utf-8")
    entries = _written_by_safetensors(file, text, 8 + length)
    if entries is None:
        fields = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(fields, dict):
            raise ValueError(f"a header that is {type(fields).__name__}")
        fields.pop("__metadata__", None)
        entries = {name: _entry(file, name, value, 8 + length) for name, value in fields.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.begin != end:
            raise ValueError(f"{name} at byte {entry.begin}, where {end} is the end of the tensor before it")
        end = entry.end
    if end != size:
        raise ValueError(f"{size} bytes, where its header describes {end}")
    return entries


def _written_by_safetensors(file: BinaryIO, text: str, start: int) -> dict[str, _Entry] | None:
    """The entries of a header in which all is as it should be, without a JSON object for each; None: ask JSON what is wrong."""
    begin, text = 1, text.rstrip(" ")
    if text.startswith(_METADATA):
        try:
            begin = 1 + json.JSONDecoder(object_pairs_hook=_unique).raw_decode(text, len(_METADATA))[1]
        except (ValueError, RecursionError):
            return None
    text = f"{text[begin:-1]}," if text[begin - 1 : begin] in ("{", ",") and text.endswith("}}") else ""
    kinds: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {}  # shape, bytes
    entries: dict[str, _Entry] = {}
    end = 0
    for tensor in _TENSOR.finditer(text):
        name, dtype, sizes, first, last = tensor.groups()
        if tensor.start() != end or dtype not in _DTYPES:
            return None
        end = tensor.end()
        kind = kinds.get((dtype, sizes))
        if kind is None:
            shape = tuple(map(int, sizes.split(","))) if sizes else ()
            kind = kinds[dtype, sizes] = shape, math.prod(shape) * _DTYPES[dtype].itemsize
        entry = _Entry(file, dtype, kind[0], start + int(first), start + int(last))
        if entry.end - entry.begin != kind[1]:
            return None
        entries[name] = entry
    whole = end == len(text) > 0 and len(entries) == text.count('"data_offsets":[') and "__metadata__" not in entries
    return entries if whole else None


def _entry(file: BinaryIO, name: str, value: Any, start: int) -> _Entry:
    if len(name) > _MAX_NAME:
        raise ValueError(f"a name of {len(name)} characters")
    value = value if isinstance(value, Mapping) else {}
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 else [None]
    if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise ValueError(f"{name} without dtype, shape and data_offsets of whole numbers")
    if len(shape) > 8:
        raise ValueError(f"{name} with {len(shape)} dimensions")
    count = offsets[1] - offsets[0]
    if dtype in _DTYPES and count != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"{name} of {count} bytes, where shape {shape} of {dtype} needs others")
    return _Entry(file, dtype, tuple(shape), start + offsets[0], start + offsets[1])
