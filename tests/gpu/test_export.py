"""AOTInductor packages on a GPU, and the errors of the CPU ops with this torch."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moelora_ops
from moelora_ops.kernels import native

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

_SPEC = importlib.util.spec_from_file_location("export_example", Path(__file__).parents[2] / "examples" / "export.py")
assert _SPEC is not None and _SPEC.loader is not None
example = sys.modules["export_example"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_package_runs_from_python(loads_packages: None, tmp_path: Path) -> None:
    """One package serves every batch size and adapter mix, other adapters too: the values of the CPU, to 1e-4 of the delta."""
    model = example.TinyMoe()
    program = example.export(model.cuda(), device="cuda")
    cases = example.run_package(example.package(program, tmp_path / "tiny_moe.pt2"), device="cuda")
    model.cpu()
    for inputs, (got,) in cases:
        x, slots, *adapters = (tensor.cpu() for tensor in inputs)
        want, base = model(x, slots, *adapters), model(x, torch.full_like(slots, -1), *adapters)
        scale = (want - base).abs().max() if (slots >= 0).any() else base.abs().max()
        assert scale > 0.1 * base.abs().max(), "the adapters change the output"
        assert got.is_cuda and (got.cpu() - want).abs().max() <= 1e-4 * scale, (x.shape, slots)


def _bad(**changes: Any) -> Any:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    arguments = dict(topk_ids=ids, token_lora_mapping=ids[:, 0], num_experts=4, block_size=8, max_loras=2)
    return lambda: torch.ops.moelora.moe_lora_align_block_size(**{**arguments, **changes})


@pytest.mark.skipif(native.CPU_MISSING != "", reason=f"_C_cpu: {native.CPU_MISSING}")
def test_cpu_errors_keep_their_type() -> None:
    """The C++ kernels hand on the type and text of the checks, through this version's bindings."""
    _bad()()
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        _bad(block_size=0)()
    with pytest.raises(TypeError, match="topk_ids must have dtype int32 or int64, got float32"):
        _bad(topk_ids=torch.zeros(3, 2))()
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"w2 must be 3-dimensional \[E, H, I\], got shape \(3, 8\)"):
        moelora_ops.fused_experts_lora(x, x, x, x, x.int(), x[:, 0].int())
