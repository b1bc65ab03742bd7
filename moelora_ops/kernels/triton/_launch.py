"""Kernels bound once and launched often: the price of a launch is that of the C call, not of Triton's argument inspection.

`kernel[grid](...)` inspects every argument of every call: 70 us for thirty arguments. All of it but the pointers follows from
sizes and types, so a `Launch` compiles its kernel once for them and afterwards hands over addresses. A `LaunchList` is several
of them as a program for `native.execute`: one call of C for all, where it is certain how Triton would have made each.
"""

from __future__ import annotations

import struct
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import native
from ._common import has_pdl


class Launch:
    """A Triton kernel with its grid, scalars and constants bound; called with its tensors, in order.

    The parameters of the kernel are ordered: tensors (or descriptors, or None), scalars, constants. Tensors of later calls have
    the dtypes of the first ones, and their alignment where the kernel specialises on it: whoever keeps a `Launch` keys it so.
    `names` says what the tensors are, for a `LaunchList`.
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
        names: Sequence[str | None] = (),
    ) -> None:
        self._kernel, self._grid, self._scalars, self._constants = kernel, (*grid, 1, 1)[:3], tuple(scalars), constants
        self.names = names
        self._maps = [_TensorMap.of(t) if isinstance(t, TensorDescriptor) else None for t in tensors]
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if constants.get("USE_PDL", has_pdl(device)):  # never a kernel that does not wait: it would overtake the one before
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

    def parameters(self, slots: Mapping[str, Slot]) -> list[tuple[int, list[int]]]:
        """Those of the compiled kernel, as `parameters` has them."""
        compiled = self._compiled
        types = [compiled.src.signature[name] for name in self._kernel.arg_names]
        where = [name and slots[name] for name in self.names]
        tensors = [slot if m is None else (slot, m) for slot, m in zip(where, self._maps)]
        return parameters(types, [*tensors, *self._tail], compiled.metadata.tensordesc_meta or ())

    def words(self, slots: Mapping[str, Slot]) -> list[int]:
        """The launch as part of a program, its tensors at `slots` by name. Loads the kernel on the current device.

        Raises: Unlisted where this Triton does not look as expected, or the loaded kernel has other parameters than we think.
        """
        if 0 in self._grid:
            return []
        try:
            compiled, metadata = self._compiled, self._compiled.metadata
            run = compiled.run  # loads it
            found = self.parameters(slots)
            simple = metadata.num_ctas == 1 and metadata.target.warp_size == 32 and not metadata.launch_cooperative_grid
            bare = metadata.global_scratch_size == metadata.profile_scratch_size == 0
            uninstrumented = not getattr(metadata, "instrumentation_mode", "")
            threads, shared, dependent = 32 * metadata.num_warps, metadata.shared, int(metadata.launch_pdl)
            function = compiled.function
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise Unlisted(f"{self._kernel}: {error!r}") from error
        sizes = [size for size, _ in found]
        if not (run and simple and bare and uninstrumented and native.has_parameters(function, sizes)):
            raise Unlisted(f"{self._kernel}: {metadata}")
        return native.launch_words(function, self._grid, threads, shared, dependent, [words for _, words in found])


class Unlisted(Exception):
    """A launch that only Triton itself is trusted to make."""


class Slot(NamedTuple):
    """Which of the addresses that a call brings, and bytes past it."""

    number: int
    offset: int = 0


class LaunchList:
    """Launches in their order, made by one call of C with the addresses of a call."""

    def __init__(self, words: Sequence[int], num_addresses: int, launches: Sequence[Launch] = ()) -> None:
        self._program = struct.pack(f"={len(words)}Q", *words)
        self._pack = struct.Struct(f"={num_addresses}Q").pack
        self._launches = launches  # they own the kernels that the program names

    @staticmethod
    def of(
        launches: Sequence[Launch], slots: Mapping[str, Slot], num_addresses: int, first: Sequence[int] = ()
    ) -> LaunchList | None:
        """After the launches of the words `first`; None where some launch is better left to Triton."""
        try:
            return LaunchList([*first, *(w for launch in launches for w in launch.words(slots))], num_addresses, launches)
        except Unlisted:
            return None

    def __call__(self, stream: int, addresses: Sequence[int]) -> bool:
        """Launch on a stream of the current device; False, and nothing done, where it does not serve.

        Raises: RuntimeError where CUDA refuses a launch.
        """
        return native.execute(self._program, self._pack(*addresses), stream)


class _TensorMap(NamedTuple):
    """A descriptor without the tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool

    @staticmethod
    def of(descriptor: TensorDescriptor) -> _TensorMap:
        plain = descriptor.padding == "zero" and not getattr(descriptor, "round_f32_to_tf32", False)
        return _TensorMap(tuple(descriptor.shape), tuple(descriptor.strides), plain)


_INTEGERS = {f"{sign}{bits}": max(bits // 8, 1) for sign in "iu" for bits in (1, 8, 16, 32, 64)}
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}
_SMALL_MAP = 128 * 1024  # bytes; maps of less need a correction with some drivers, which Triton knows and applies


def parameters(types: Sequence[Any], values: Sequence[Any], maps: Iterable[Any]) -> list[tuple[int, list[int]]]:
    """(size in bytes, words of a program) of each parameter of a compiled kernel, in order.

    Constants have none, and neither have arguments that Triton made constants of (None, an int 1). A descriptor is a tensor
    map, then its sizes (int32) and strides (int64). Two pointers to scratch end the list, null where the kernel uses none.

    Args:
        types: of every argument as Triton's signature has them ("*bf16", "i32", "constexpr", "tensordesc<...>").
        values: a `Slot` for a pointer, (`Slot`, its map) for a descriptor, else the number; not looked at for a constant.
        maps: what the compiler says of each descriptor: element type and size, swizzle, box.

    Raises: Unlisted for anything else.
    """
    found: list[tuple[int, list[int]]] = []
    remaining = iter(maps)
    for kind, value in zip(types, values, strict=True):
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            raise Unlisted(f"a parameter of type {kind}")
        if kind.startswith("*"):
            found.append((8, [native.ADDRESS, *value]))
        elif kind in _INTEGERS:
            found.append((_INTEGERS[kind], [native.VALUE, int(value) & (2**64 - 1)]))
        elif kind in _FLOATS:
            packed = struct.pack(_FLOATS[kind], value)
            found.append((len(packed), [native.VALUE, int.from_bytes(packed, "little")]))
        elif kind.startswith("tensordesc"):
            slot, described = value
            found += _map_parameters(slot, described, next(remaining, None))
        else:
            raise Unlisted(f"a parameter of type {kind}")
    if next(remaining, None) is not None:
        raise Unlisted("more tensor maps than descriptors")
    return [*found, (8, [native.VALUE, 0]), (8, [native.VALUE, 0])]


def _map_parameters(slot: Slot, described: _TensorMap, compiled: Any) -> list[tuple[int, list[int]]]:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as HOST_TYPES

    if compiled is None or compiled["fp4_padded"] or compiled.get("is_im2col") or not described.plain:
        raise Unlisted(f"a descriptor {described} compiled as {compiled}")
    shape, strides, item = described.shape, described.strides, compiled["elem_size"]
    box = compiled["block_size"]
    if item * (1 + sum((n - 1) * s for n, s in zip(shape, strides))) < _SMALL_MAP or len(box) != len(shape):
        raise Unlisted(f"a descriptor {described} compiled as {compiled}")
    words = [native.TENSOR_MAP, *slot, HOST_TYPES[compiled["elem_type"]], compiled["swizzle"], 0, len(shape), *reversed(shape)]
    words += [*(item * s for s in reversed(strides[:-1])), *reversed(box)]
    return [(128, words), *((4, [native.VALUE, n]) for n in shape), *((8, [native.VALUE, s]) for s in strides)]


class Scratch:
    """Where the sections of a call's one buffer of scratch lie, aligned to 256 bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.size = dtype, 0  # of the buffer; bytes
        self.sections: dict[str, tuple[int, int, torch.dtype]] = {}  # first byte, elements, dtype

    def add(self, name: str, numel: int, dtype: torch.dtype, *, at: int | None = None) -> int:
        """Place a section at the end, or at a byte where another lies that is dead by then; returns the first byte after it."""
        at = self.size if at is None else at
        self.sections[name] = (at, numel, dtype)
        end = -(-(at + numel * dtype.itemsize) // 256) * 256
        self.size = max(self.size, end)
        return end

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.size // self.dtype.itemsize

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The sections of a buffer of `numel` elements."""
        data = buffer.view(torch.uint8)
        return {name: data[at : at + n * dtype.itemsize].view(dtype) for name, (at, n, dtype) in self.sections.items()}


def current_stream(device: torch.device) -> int:
    """Handle of the device's current stream; 0 in the interpreter."""
    return int(triton.runtime.driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0
