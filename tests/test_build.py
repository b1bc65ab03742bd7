"""What compiles without a GPU: the CUDA C++ sources by nvcc, the Triton sorts ahead of time, each for three targets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (80, 90, 100)
WITHOUT_KERNELS = ("execute",)  # it launches those that others compiled
SORTS = {"align": {"_align_count", "_align_place"}, "route": {"_route_count", "_route_place"}}


def aot_compile(capability: int, case: str, cache: Path) -> list[tuple[str, str, int, int]]:
    """(kernel, hash, bytes of shared memory, waits) of each launch of a case of aot_compile.py."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(ROOT / "tests" / "aot_compile.py"), str(capability), case]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    fields = [line.split() for line in done.stdout.splitlines()]
    return [(name, digest, int(shared), int(waits)) for name, digest, shared, waits in fields]


@pytest.mark.parametrize("case", SORTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_triton_sorts_compile(capability: int, case: str, tmp_path: Path) -> None:
    """Both launches compile with every optional argument, in little shared memory, and wait first where launches overlap."""
    launches = aot_compile(capability, case, tmp_path)
    assert {name for name, *_ in launches} == SORTS[case]
    for name, _, shared, waits in launches:
        assert shared <= 48 * 1024, name
        assert waits == (1 if capability >= 90 else 0), name


def test_triton_sorts_compile_once_for_all_batches(tmp_path: Path) -> None:
    """No batch size, block size or alignment of the ids compiles anything new."""
    launches = aot_compile(90, "sorts_of_any_size", tmp_path)
    assert len(launches) > 100
    assert len({digest for _, digest, *_ in launches}) == len(SORTS["align"] | SORTS["route"])


@pytest.mark.skipif(shutil.which(os.environ.get("NVCC", "nvcc")) is None, reason="needs nvcc, the CUDA compiler")
def test_cuda_sources_compile_without_warnings(tmp_path: Path) -> None:
    """Each .cu compiles for every target with all warnings as errors, and none of its kernels spills."""
    nvcc = os.environ.get("NVCC", "nvcc")
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    assert sources
    targets = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in CAPABILITIES]
    flags = ["-O3", "-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xptxas", "-v"]
    flags += ["-Xcompiler", "-fPIC,-Wall,-Wextra", "-Werror", "all-warnings"]
    flags += ["-isystem", str(Path(torch.__file__).parent / "include")]
    for source in sources:
        command = [nvcc, "-c", *flags, *targets, str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        spills = [line for line in done.stderr.splitlines() if "spill stores" in line]
        assert len(spills) >= (0 if source.stem in WITHOUT_KERNELS else len(CAPABILITIES) * 3)
        assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills
