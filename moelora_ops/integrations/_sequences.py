"""Which adapter each row of a batch uses, at fixed device addresses: from one slot per sequence to one per token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..ops import moe_lora_align_block_size

Routing = tuple[Tensor, Tensor, Tensor, Tensor]  # topk_weights, and what the alignment returns
_BLOCK_SIZE = 16  # of the alignment for linear layers


def fixed(*shape: int, dtype: torch.dtype, device: torch.device, fill: int = 0) -> Tensor:
    """A tensor that never moves; torch.compile's CUDA graphs read it in place instead of copying it into each replay."""
    with torch.inference_mode(False):  # a tensor made inside it could not be written outside
        tensor = torch.full(shape, fill, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


class Rows:
    """The slots of one call's rows, and the alignment of its linear layers, made by the first of them."""

    def __init__(self, num_rows: int, slots: Tensor) -> None:
        self.num_rows, self.slots = num_rows, slots
        self._routing: Routing | None = None

    def routing(self, max_loras: int, adapter_enabled: Tensor) -> Routing:
        """The rows sorted by slot, as pairs of a single expert."""
        if self._routing is None:
            ids, weights = torch.zeros_like(self.slots), torch.ones_like(self.slots, dtype=torch.float32)
            aligned = moe_lora_align_block_size(
                ids.unsqueeze(1), self.slots, 1, _BLOCK_SIZE, max_loras, adapter_enabled=adapter_enabled
            )
            self._routing = (weights.unsqueeze(1), *aligned)
        return self._routing


class Sequences:
    """The slots of the sequences of a batch, [max_sequences] int32, of which the first `count` are in use.

    Whatever has `count` * q rows in the order of its sequences (tokens of a prompt, beams, candidates, chunks) gives rows
    i * q to (i + 1) * q the slot of sequence i: slots[t * count // num_rows]. The count is a tensor too, so that compiled and
    captured code follows it.
    """

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self.max_sequences = max_sequences
        self.host: tuple[int, ...] = (-1,)  # a copy, so that asking never waits for the device
        self.move(device)

    def move(self, device: torch.device) -> None:
        """To another device, with what is chosen."""
        self.slots = fixed(self.max_sequences, dtype=torch.int32, device=device, fill=-1)
        self.count = fixed(1, dtype=torch.int64, device=device, fill=1)
        self.set(self.host)

    def set(self, slots: Sequence[int]) -> None:
        """Slots of the next batches: one per sequence, or a single one for all."""
        self.host = tuple(slots)
        self._rows: Rows | None = None  # of the forward that is running
        self.slots[: len(self.host)].copy_(torch.tensor(self.host, dtype=torch.int32))
        self.count.fill_(len(self.host))

    def begin(self, num_rows: int) -> None:
        """Work out the rows' slots once for all layers of a forward."""
        self._rows = self._make(num_rows)

    def end(self) -> None:
        """Forget them: what comes after the layers has other rows."""
        self._rows = None

    def rows(self, num_rows: int) -> Rows:
        """The slots of so many rows, [num_rows] int32."""
        if self._rows is not None and self._rows.num_rows == num_rows:
            return self._rows
        return self._make(num_rows)

    def _make(self, num_rows: int) -> Rows:
        index = torch.arange(num_rows, device=self.count.device) * self.count // num_rows
        return Rows(num_rows, self.slots.index_select(0, index))


def batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """[B, S] of a forward's tokens."""
    for tokens in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1]):
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens.shape[0], tokens.shape[1]
    return None


def prompts_of_generate() -> int | None:
    """The number of prompts that transformers' generate was given, if it is among the callers; 1 where it was given none."""
    from transformers import GenerationMixin

    code: CodeType = _unwrapped(GenerationMixin.generate).__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    arguments = {**frame.f_locals.get("kwargs", {}), "inputs": frame.f_locals.get("inputs")}
    given = (arguments.get(name) for name in ("inputs", "inputs_embeds", "input_ids"))
    return next((tokens.shape[0] for tokens in given if isinstance(tokens, Tensor)), 1)


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
