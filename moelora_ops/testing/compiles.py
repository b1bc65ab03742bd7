"""What torch.compile did to a function: its compiles, graph breaks, and the copies in Inductor's code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code


class Counted:
    """A function under `torch.compile(fullgraph=True)`; `compiles` counts its graphs so far."""

    def __init__(self, function: Callable[..., Any], *, backend: str = "aot_eager", **options: Any) -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._function = torch.compile(function, fullgraph=True, backend=self._counter, **options)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    @property
    def compiles(self) -> int:
        return int(self._counter.frame_count)


def graph_breaks(function: Callable[..., Any], *args: Any) -> list[str]:
    """Why `torch.compile` without fullgraph would leave the graph, once per break."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(function)(*args)
    torch._dynamo.reset()
    if explained.graph_count == 0:
        raise ValueError("function must have something to compile, got no graph")
    return [reason.reason for reason in explained.break_reasons]


def unbacked(*tensors: Tensor) -> None:
    """Make dimension 0 of all these tensors one size that nothing may specialise on, 0 and 1 included."""
    for tensor in tensors:
        mark_unbacked(tensor, 0, shape_id="tokens")


@dataclass(frozen=True)
class Generated:
    """Inductor's code of a function, and how many written tensors it had to clone first (`missed`)."""

    code: str
    missed: int

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> Generated:
        """Call a function that Inductor compiles as one graph, without caches: else an earlier version of it may answer."""
        ReinplaceCounters.clear()
        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(function, *args)
        if len(codes) != 1:
            raise ValueError(f"function must be compiled as one graph by this call, got {len(codes)} graphs")
        return cls(str(codes[0]), ReinplaceCounters.get_total_missed())

    def writers(self, op: str) -> list[list[str]]:
        """For each call of moelora::`op`: what was called with the buffer of its first argument since this was allocated.

        In code without copies it is the one kernel that computes the values the op adds to.
        """
        found, since = [], dict[str, list[str]]()
        for line in self.code[self.code.index("def call(") :].splitlines():
            allocated = re.match(r"\s*(buf\d+) = (?!torch\.|extern_kernels\.)", line)
            if allocated:
                since[allocated[1]] = []
                continue
            called = re.match(r"\s*(?:\w+ = )?([\w.]+)\((.*)\)", line)
            if called is None or called[1].startswith("assert_"):
                continue
            buffers = re.findall(r"\bbuf\d+\b", called[2])
            if called[1] == f"torch.ops.moelora.{op}.default":
                found.append(list(since.get(buffers[0], [])))
            for buffer in buffers:
                since.setdefault(buffer, []).append(called[1].removesuffix(".run"))
        return found


def up_to_the_pass(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """Inductor's way to the slot of the pass, and the graph as it is behind it: no code, which takes seconds on a CPU."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    gm = joint_graph_passes(gm)
    view_to_reshape(gm)
    rewrite: Any = config.post_grad_custom_pre_pass
    rewrite(gm.graph)
    gm.recompile()
    return make_boxed_func(gm.forward)


REWRITTEN = aot_autograd(fw_compiler=up_to_the_pass, decompositions=select_decomp_table())
