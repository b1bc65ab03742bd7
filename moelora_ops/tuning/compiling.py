"""Compiles configurations in parallel processes, on tensors without memory; the results wait in Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Iterable, NamedTuple

import torch
from torch import Tensor

from ..kernels.config import Experts
from ..testing.cases import Case

MOST_PROCESSES = 24  # each has a CUDA context


class Job(NamedTuple):
    """A configuration to compile for a layer, with or without adapters."""

    case: Case
    tiles: Experts
    adapters: bool
    device: str


class Compiler:
    """Worker processes that compile jobs, each once."""

    def __init__(self, num_processes: int | None = None) -> None:
        self.num_processes = num_processes or max(1, min((os.cpu_count() or 2) - 1, MOST_PROCESSES))
        self._pool: ProcessPoolExecutor | None = None
        self._done: set[Job] = set()

    def __call__(self, jobs: Iterable[Job]) -> dict[Job, str]:
        """Compile what was not compiled before; the messages of jobs that cannot be.

        A process that dies (a compiler may abort) takes the others of its pool with it: what they had left is compiled on use.
        """
        failed: dict[Job, str] = {}
        chosen = [job for job in dict.fromkeys(jobs) if job not in self._done]
        self._done.update(chosen)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.num_processes, mp_context=multiprocessing.get_context("spawn"))
        for job, future in [(job, self._pool.submit(compile_one, job)) for job in chosen]:
            try:
                future.result()
            except BrokenProcessPool:
                self.close()
                break
            except Exception as error:  # a compiler's errors have no common type
                failed[job] = f"{type(error).__name__}: {error}"
        return failed

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


def compile_one(job: Job) -> None:
    """Compile the kernels of a job in this process."""
    from ..kernels.triton.experts import make_plan

    make_plan(meta_call(job.case, adapters=job.adapters), job.tiles, torch.device(job.device))


def meta_call(case: Case, *, adapters: bool) -> Any:
    """The call of the layer op that `case` makes with a `LoraPool`, of tensors that have no memory."""
    from ..kernels.triton.call import prepare

    def empty(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    t, e, h, i, k = case.num_tokens, case.num_experts, case.hidden_size, case.intermediate_size, case.top_k
    l, r, s = case.max_loras, case.max_lora_rank, case.num_slices
    batch = (empty(t, k, dtype=torch.float32), empty(t, k, dtype=case.ids_dtype), empty(t, dtype=case.ids_dtype))
    lora = (empty(l, e, s * r, h), empty(l, e, s * i, r), empty(l, e, r, i), empty(l, e, h, r)) if adapters else (None,) * 4
    return prepare(
        empty(t, h), empty(e, s * i, h), empty(e, h, i), *batch, *lora,
        lora_ranks=empty(l, dtype=torch.int32) if adapters else None,
        adapter_enabled=empty(l, dtype=torch.int32) if adapters else None,
        w13_bias=empty(e, s * i) if case.bias else None,
        w2_bias=empty(e, h) if case.bias else None,
        expert_map=empty(case.num_global_experts, dtype=case.ids_dtype) if case.num_global_experts else None,
        activation=case.activation,
        gated=case.gated,
        interleaved=case.interleaved,
        swiglu_alpha=case.swiglu_alpha,
        swiglu_limit=case.swiglu_limit,
        apply_router_weight_on_input=case.apply_router_weight_on_input,
        routed_scaling_factor=case.routed_scaling_factor,
    )  # fmt: skip
