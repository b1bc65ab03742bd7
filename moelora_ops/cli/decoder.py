"""Runs the demo's model step by step: eagerly, compiled, or as a CUDA graph, with the same inputs and outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from .tiny_model import CONFIG, TinyMoE


@dataclass(frozen=True)
class Run:
    """What a decode loop did: tokens [N, B] fed, logits [N, B, V] and experts taken [N, layers, B, K]."""

    tokens: Tensor
    logits: Tensor
    ids: Tensor


class Decoder:
    """A model with its inputs at fixed addresses. `compile` and `capture` change how a step runs, never what it computes."""

    def __init__(self, model: TinyMoE, slots: Tensor) -> None:
        self._model: Callable[..., tuple[Tensor, Tensor]] = model
        self._graph: torch.cuda.CUDAGraph | None = None
        shape = (CONFIG["num_hidden_layers"], len(slots), CONFIG["num_experts_per_tok"])
        self.slots = slots.clone()
        self.tokens = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=slots.device)
        self.given_ids = torch.full(shape, -1, dtype=torch.int32, device=slots.device)

    def compile(self, backend: str) -> None:
        self._model = torch.compile(self._model, fullgraph=True, dynamic=False, backend=backend)
        self._forward()

    def capture(self) -> None:
        """Capture a step, after the warm-up that lazily compiled kernels need."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._forward()

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Logits (B, vocabulary) after one token of every sequence; overwritten by the next step."""
        self.tokens.copy_(tokens)
        self.position.fill_(position)
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        return self.logits

    def generate(self, start: Tensor, steps: int, before_step: Callable[[int], None] = lambda step: None) -> Run:
        """Decode greedily from one start token per sequence."""
        self.given_ids.fill_(-1)
        tokens, seen = start, []
        for position in range(steps):
            before_step(position)
            logits = self.step(tokens, position)
            seen.append((tokens, logits.clone(), self.ids.clone()))
            tokens = logits.argmax(-1)
        return Run(*(torch.stack(column) for column in zip(*seen)))

    def follow(self, run: Run, before_step: Callable[[int], None] = lambda step: None) -> Tensor:
        """Logits [N, B, V] for the tokens and the experts of another run: a difference is then arithmetic, not another path."""
        logits = []
        for position, (tokens, ids) in enumerate(zip(run.tokens, run.ids)):
            before_step(position)
            self.given_ids.copy_(ids)
            logits.append(self.step(tokens, position).clone())
        return torch.stack(logits)

    def tokens_per_second(self, start: Tensor, steps: int, repeats: int) -> float:
        """The best of `repeats` greedy decode loops."""
        self.given_ids.fill_(-1)
        best = float("inf")
        for _ in range(repeats):
            _synchronize(start.device)
            began = time.perf_counter()
            tokens = start
            for position in range(steps):
                tokens = self.step(tokens, position).argmax(-1)
            _synchronize(start.device)
            best = min(best, time.perf_counter() - began)
        return len(start) * steps / best

    def _forward(self) -> None:
        self.logits, self.ids = self._model(self.tokens, self.position, self.slots, self.given_ids)


def num_compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    return counters["stats"]["unique_graphs"]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
