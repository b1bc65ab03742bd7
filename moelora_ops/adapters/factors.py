"""A and B of one projection on their way into a pool: do they fit, and the copy that folds the scaling in.

Both go piece by piece, in the order of memory: an adapter of GBs, which may be a mapped file, is read at the speed of memory
and never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..checks import COMPUTE_DTYPES, short
from ..errors import AdapterError

# Of an adapter: other dtypes need a meaning that a pair does not carry (int8 a scale, complex a real part).
FACTOR_DTYPES = (*COMPUTE_DTYPES, torch.float64)
PIECE = 1 << 23  # elements handled at once: what a load needs beside the adapter and the slot


def check_shapes(
    where: str, a: Tensor, b: Tensor, scaling: Tensor, *, num_experts: int, size_in: int, size_out: int, max_rank: int
) -> None:
    """a [E or 1, r, in], b [E or 1, out, r] and scaling [E or 1], all float, r <= max_rank.

    Raises: AdapterError naming `where`, the factor, what was expected and what came.
    """
    for part, value in (("a", a), ("b", b), ("scaling", scaling)):
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dtype not in FACTOR_DTYPES:
            kind = f"{value.layout} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise AdapterError(f"{where}.{part} must be a dense {short(FACTOR_DTYPES)} tensor, got {kind}")
    if a.dim() != 3:
        raise AdapterError(f"{where}.a must be 3-dimensional [E or 1, r, in], got shape {tuple(a.shape)}")
    rank = a.shape[1]
    if rank > max_rank:
        raise AdapterError(f"{where} rank must be <= max_rank = {max_rank} of the pool, got {rank}")
    shapes: tuple[tuple[str, Tensor, tuple[int, ...]], ...] = (
        ("a", a, (rank, size_in)),
        ("b", b, (size_out, rank)),
        ("scaling", scaling, ()),
    )
    for part, tensor, matrix in shapes:
        if tensor.dim() < 1 or tensor.shape[0] not in (1, num_experts) or tuple(tensor.shape[1:]) != matrix:
            want = ", ".join(map(str, (f"{num_experts} or 1", *matrix)))
            raise AdapterError(f"{where}.{part} must have shape [{want}], got {tuple(tensor.shape)}")


def check_values(where: str, a: Tensor, b: Tensor, scaling: Tensor, dtype: torch.dtype) -> None:
    """A and scaling * B, folded in fp32, must be finite in `dtype`.

    The largest magnitude tells, for rounding is monotonic and aminmax passes NaN on: one pass at the speed of memory, where
    isfinite runs at a fiftieth of it (bf16, CPU).

    Raises: AdapterError.
    """
    bound = largest(b).float() * largest(scaling).float().to(b.device)
    fits = {
        "A": bool(torch.isfinite(largest(a).to(dtype))),
        "scaling * B": bool(torch.isfinite(bound.to(dtype))) or _all_fold(b, scaling, dtype),
    }
    for name, finite in fits.items():
        if not finite:
            raise AdapterError(f"{where} {name} must be finite in {short([dtype])}, got infinite or NaN values")


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, or NaN if there is one; [] of the tensor's dtype."""
    strides = tensor.stride()
    lying = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    ends = [torch.stack(torch.aminmax(lying[start : start + rows].contiguous())) for start, rows in _pieces(lying, 0)]
    return torch.stack(ends).abs().amax() if ends else tensor.new_zeros(())


def copy_factor(target: Tensor, source: Tensor, scaling: Tensor | None = None) -> None:
    """target = scaling * source: multiplied in fp32, cast once, on the target's device.

    Args:
        target: (E or 1, rows, columns), a view of a slot. source: (E or 1, rows, columns); 1 goes to all experts of target.
        scaling: (E or 1); None: 1.
    """
    scales = torch.ones(1) if scaling is None else scaling.float().cpu()
    uniform = bool((scales == scales[0]).all())
    source = source.expand(max(len(source), 1 if uniform else len(scales)), -1, -1)
    along = 0 if source.stride(0) >= source.stride(1) else 1
    for start, size in _pieces(source, along):
        # `to` moves a dense view as it lies: it is put in order over there.
        piece = _in_order(source.narrow(along, start, size).to(target.device))
        to = target if len(source) == 1 and along == 0 else target.narrow(along, start, size)
        if not uniform:
            to.copy_(_fold(piece, scales[start : start + size] if along == 0 else scales))
        elif scales[0] == 1:
            to.copy_(piece)
        elif piece.dtype == target.dtype:
            torch.mul(piece.expand_as(to), float(scales[0]), out=to)  # computes in fp32 inside, without a tensor of it
        else:
            to.copy_(piece.float() * float(scales[0]))


def _in_order(tensor: Tensor) -> Tensor:
    """The values contiguous. Experts that lie innermost (PEFT's fused lora_B) move as a matrix: 4 GB/s of a CPU core, not 2."""
    if tensor.stride(0) != 1 or len(tensor) == 1:
        return tensor.contiguous()
    matrix = tensor.permute(1, 2, 0).contiguous().flatten(0, 1)
    return matrix.t().contiguous().view(tensor.shape)


def _fold(b: Tensor, scaling: Tensor) -> Tensor:
    return b.float() * scaling.to(b.device, torch.float32)[:, None, None]


def _all_fold(b: Tensor, scaling: Tensor, dtype: torch.dtype) -> bool:
    """Value by value: the largest one and the largest scaling may be of different experts."""
    experts = max(len(b), len(scaling))
    b, scaling = b.expand(experts, -1, -1), scaling.expand(experts)
    parts = (slice(start, start + size) for start, size in _pieces(b, 0))
    return all(bool(torch.isfinite(_fold(b[part], scaling[part]).to(dtype)).all()) for part in parts)


def _pieces(tensor: Tensor, dim: int) -> Iterator[tuple[int, int]]:
    """(start, size) along a dimension, of about PIECE elements and at least one row."""
    if tensor.numel() == 0:
        return
    length = tensor.shape[dim]
    rows = max(1, PIECE * length // tensor.numel())
    for start in range(0, length, rows):
        yield start, min(rows, length - start)
