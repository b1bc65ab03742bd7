"""Tests of the compiled kernels at real sizes. `make test-gpu` runs them; every test here carries the mark `gpu`."""

from __future__ import annotations

import subprocess
import sys
import gc
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Tests of several GB do not pile up."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Captured:
    """A function captured in a CUDA graph; before each replay all memory that belongs to the graph is filled with NaN.

    With a `pool` (torch.cuda.graph_pool_handle()) the memory is that of all graphs captured in it so far.
    """

    def __init__(self, function: Callable[[], Tensor], *, warm_up: bool = True, pool: Any = None) -> None:
        if warm_up:  # Triton compiles on first use
            with torch.cuda.stream(torch.cuda.Stream()):
                function()
            torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = function()
        segments = torch.cuda.memory_snapshot()
        own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self.graph.pool())]
        self.memory = [torch.as_tensor(_Bytes(s["address"], s["total_size"]), device="cuda") for s in own]
        assert self.memory, "the graph owns its scratch"

    def replay(self) -> Tensor:
        for segment in self.memory:
            segment.fill_(0xFF)  # NaN in every floating-point dtype, -1 in every integer dtype
        self.graph.replay()
        return self.output.clone()


class _Bytes:
    """Device memory by address, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@pytest.fixture
def capture() -> Any:
    return Captured


@pytest.fixture
def without_pdl(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Call a function with every kernel launched after the end of the one before it."""

    def call(function: Callable[[], Tensor]) -> Tensor:
        from moelora_ops.kernels.triton import _common, _launch, _plan, delta, experts, route

        with monkeypatch.context() as patch:
            for module in (_common, _launch, _plan, delta, route):
                patch.setattr(module, "has_pdl", lambda device: False)
            for module in (delta, experts):
                patch.setattr(module, "_PLANS", {})  # launches are bound with or without it
            return function()

    return call


@pytest.fixture
def far() -> Callable[[Tensor], Tensor]:
    """The tensor in a buffer so large that the last entry of its first dimension lies past 2^31 elements."""

    def place(tensor: Tensor) -> Tensor:
        first, rest = tensor.shape[0], tensor[0].numel()
        stride = -(-(2**31) // (first - 1) // 16) * 16
        stride = max(stride + 16, rest)
        buffer = torch.empty((first - 1) * stride + rest, dtype=tensor.dtype, device=tensor.device)
        view = buffer.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride()))
        assert view[-1].data_ptr() - view.data_ptr() > 2**31 * tensor.element_size()
        return view.copy_(tensor)

    return place


PLAIN_PACKAGE = """
import sys, torch
program = torch.export.export(torch.nn.Linear(8, 8).cuda(), (torch.ones(2, 8).cuda(),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1]))
print("loaded")
"""


@pytest.fixture(scope="session")
def loads_packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where torch itself cannot load a package of a model in which nothing is ours."""
    path = tmp_path_factory.mktemp("plain") / "plain.pt2"
    done = subprocess.run([sys.executable, "-c", PLAIN_PACKAGE, str(path)], capture_output=True, text=True)
    if done.returncode < 0:
        pytest.skip(f"torch's AOTInductor loads no CUDA package here, not even of one Linear: signal {-done.returncode}")
    assert "loaded" in done.stdout, done.stderr[-2000:]
