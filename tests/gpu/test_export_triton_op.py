"""Whether kernels of ours can lie inside a package: the delta of one batch size as a `triton_op`, run without any op of ours.

An experiment, not a feature: docs/export.md has why there is no such variant of the ops.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

import moelora_ops
from moelora_ops.kernels.triton import delta
from moelora_ops.testing.cases import Case
from moelora_ops.testing.oracle import assert_bitwise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

_SPEC = importlib.util.spec_from_file_location("export_example", Path(__file__).parents[2] / "examples" / "export.py")
assert _SPEC is not None and _SPEC.loader is not None
example = sys.modules["export_example"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)

CASE = Case("inside", num_tokens=33, num_experts=8, hidden_size=64, intermediate_size=48, max_lora_rank=16)


class Recorded(NamedTuple):
    """What a `Launch` is made of, not compiled."""

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    options: dict[str, Any]

    @staticmethod
    def launch(kernel: Any, grid: Any, tensors: Any, scalars: Any, constants: Any, *, device: Any, **options: Any) -> Recorded:
        return Recorded(kernel, grid, scalars, {**constants, **options})

    def __call__(self, *tensors: Tensor | None) -> None:
        wrap_triton(self.kernel)[self.grid](*tensors, *self.scalars, **self.options)


def launches_of(monkeypatch: pytest.MonkeyPatch, arguments: Any) -> tuple[int, Recorded, Recorded]:
    """(splits, shrink, expand) for the sizes of these arguments, without dependent launch: that is not Inductor's."""
    with monkeypatch.context() as patch:
        patch.setattr(delta, "Launch", Recorded.launch)
        patch.setattr(delta, "has_pdl", lambda device: False)
        plan = delta.Plan(delta.prepare(*arguments))
    ((_, shrink, expand),) = plan.stages
    return plan.splits, shrink, expand


def make(monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> tuple[nn.Module, list[Tensor]]:
    """A model that adds a delta to its argument, and its inputs; none of our ops is in it."""
    inputs = CASE.make(device)
    args, kwargs = inputs.align(16)
    aligned = moelora_ops.moe_lora_align_block_size(*args, **kwargs)
    a, b = inputs.gate_up_lora()
    output = torch.randn(CASE.num_tokens, CASE.top_k, 2 * CASE.intermediate_size, device=device)
    splits, shrink, expand = launches_of(monkeypatch, (output, inputs.hidden_states, a, b, inputs.topk_weights, *aligned))

    @triton_op("moelora_test::delta", mutates_args={"output"})
    def add_delta(
        output: Tensor, x: Tensor, a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor, ids: Tensor, experts: Tensor, lengths: Tensor
    ) -> None:
        z = delta.new_z(output, splits, CASE.num_pairs, 2 * CASE.max_lora_rank)
        shrink(x, z, a0, a1, ids, experts, lengths, None, None)
        expand(output, z, b0, b1, None, ids, experts, lengths, None)

    class Model(nn.Module):
        def forward(
            self, base: Tensor, x: Tensor, a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor, ids: Tensor, experts: Tensor,
            lengths: Tensor,
        ) -> Tensor:  # fmt: skip
            output = base * 2
            add_delta(output, x, a0, a1, b0, b1, ids, experts, lengths)
            return output

    return Model(), [output, inputs.hidden_states, *a, *b, *aligned]


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_can_hold_the_deltas_kernels(loads_packages: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its file has the two kernels as binaries; from Python, and from C++ without it, it has the bits of the op."""
    model, inputs = make(monkeypatch)
    want = inputs[0] * 2
    moelora_ops.fused_moe_lora(want, inputs[1], inputs[2:4], inputs[4:6], torch.zeros(*want.shape[:2]).cuda(), *inputs[6:])
    with torch.no_grad():
        path = example.package(torch.export.export(model, tuple(inputs)), tmp_path / "delta.pt2")
    names = zipfile.ZipFile(path).namelist()
    assert sum(name.endswith((".cubin", ".fatbin")) for name in names) >= 2, names
    output = torch._inductor.aoti_load_package(str(path))(*inputs)
    output = output if isinstance(output, Tensor) else output[0]
    assert_bitwise(output.cpu(), want.cpu())
    printed = example.run_driver(example.compile_driver(tmp_path / "driver"), path, [(inputs, [want])])
    assert printed.count("equal") == 1
