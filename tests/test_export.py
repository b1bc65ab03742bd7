"""torch.export and AOTInductor on the CPU: from Python, from a process that did nothing else, and from C++ without Python."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moelora_ops import meta
from moelora_ops.kernels import native
from moelora_ops.testing.oracle import assert_bitwise

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("export_example", ROOT / "examples" / "export.py")
assert _SPEC is not None and _SPEC.loader is not None
example = sys.modules["export_example"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, a C++ compiler")
NEEDS_NATIVE = pytest.mark.skipif(native.CPU_MISSING != "", reason=f"_C_cpu: {native.CPU_MISSING}")


class Model(example.TinyMoe):
    """The example's model, and the delta with an offset that follows the batch: one of the sizes that a package reads."""

    def forward(
        self, x: Tensor, slots: Tensor, lora_a13: Tensor, lora_b13: Tensor, lora_a2: Tensor, lora_b2: Tensor, ranks: Tensor
    ) -> Any:
        y, num_tokens = super().forward(x, slots, lora_a13, lora_b13, lora_a2, lora_b2, ranks), x.shape[0]
        weights, ids = (x @ self.router.t()).softmax(-1).topk(example.K)
        aligned = torch.ops.moelora.moe_lora_align_block_size(ids, slots, example.E, 8, example.L)
        output = x.new_zeros(num_tokens, example.K, example.H + num_tokens)
        act = x[:, None, : example.I].expand(-1, example.K, -1).flatten(0, 1).contiguous()
        torch.ops.moelora.fused_moe_lora(
            output, act, [lora_a2], [lora_b2], weights, *aligned, lora_ranks=ranks, offset=num_tokens
        )
        return y, output


def run(program: nn.Module | Any, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return list(program(*inputs))


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return example.export(Model())


@pytest.fixture(scope="module")
def package(program: torch.export.ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package for the tests below: it is what takes their time."""
    path: Path = example.package(program, tmp_path_factory.mktemp("package") / "model.pt2")
    return path


@pytest.fixture(scope="module")
def cases(package: Path) -> list[Any]:
    """Inputs and outputs of batches and adapter mixes, by a process that only imports moelora_ops and loads the package."""
    file = package.with_suffix(".results")
    code = (
        "import importlib.util, pathlib, sys, torch\n"
        "spec = importlib.util.spec_from_file_location('example', sys.argv[1])\n"
        "example = importlib.util.module_from_spec(spec); spec.loader.exec_module(example)\n"
        "torch.save(example.run_package(pathlib.Path(sys.argv[2])), sys.argv[3])\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "examples" / "export.py"), str(package), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Any] = torch.load(file)
    return found


def test_an_exported_program_survives_a_file(program: torch.export.ExportedProgram) -> None:
    """Saved, loaded and run on batches that were not traced: the bits of the model."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded, model = torch.export.load(file).module(), Model()
    for num_tokens, slots in ((1, [2]), (5, [0, -1, 2]), (77, [1, 7, 0, -1]), (6, [-1])):
        inputs = [*example.batch(num_tokens, slots), *example.adapters(3)]
        for got, want in zip(run(loaded, inputs), run(model, inputs), strict=True):
            assert_bitwise(got, want)


def test_an_exported_program_keeps_the_ops(program: torch.export.ExportedProgram) -> None:
    """The program has our ops as they were called, none traced into."""
    found = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("moelora")]
    assert {name.split(".")[1] for name in found} == {op.NAME for op in meta.OPS} and len(found) == 7


@NEEDS_COMPILER
def test_a_package_runs_in_a_fresh_process(cases: list[Any]) -> None:
    """One package for each batch size, adapter mix and set of adapters, none at all too; offsets default, given and dynamic."""
    model = Model()
    assert {len(inputs[0]) for inputs, _ in cases} == {1, 5, 7, 64}
    assert any((inputs[1] < 0).all() for inputs, _ in cases)
    for inputs, outputs in cases:
        wants, bases = run(model, inputs), run(model, [inputs[0], torch.full_like(inputs[1], -1), *inputs[2:]])
        for got, want, base in zip(outputs, wants, bases, strict=True):
            delta = (want - base).abs().max()
            assert ((inputs[1] < 0).all() and delta == 0) or delta > 0.1 * base.abs().max()
            assert (got - want).abs().max() <= 1e-5 * max(float(delta), float(base.abs().max()))


@NEEDS_COMPILER
@NEEDS_NATIVE
def test_a_package_runs_without_python(package: Path, cases: list[Any], tmp_path: Path) -> None:
    """The C++ driver gets the bits that Python got, and an error in words where arguments do not fit."""
    driver = example.compile_driver(tmp_path / "driver")
    linked = subprocess.run(["ldd", str(driver)], check=True, capture_output=True, text=True).stdout
    assert "libtorch_cpu" in linked and "python" not in linked.replace(str(Path(torch.__file__).parent), "")
    printed = example.run_driver(driver, package, cases)
    assert printed.count("equal") == len(cases) and "DIFFERENT" not in printed
    (inputs, outputs), *_ = cases
    wrong = [(inputs, [output + 1 for output in outputs])]
    with pytest.raises(subprocess.CalledProcessError) as different:
        example.run_driver(driver, package, wrong)
    assert "DIFFERENT" in different.value.stdout
    ranks_of_int64 = [*inputs[:-1], inputs[-1].long()]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        example.run_driver(driver, package, [(ranks_of_int64, outputs)])
    assert refused.value.returncode == 1 and "arguments do not fit the op" in refused.value.stderr


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@NEEDS_NATIVE
def test_schemas_of_both_worlds_are_the_same() -> None:
    """_C_schemas defines what meta/ does, and the package that comes after it says that it is one too many."""
    library, _ = native.runtime_libraries()
    done = python(
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        f"for name in {[op.NAME for op in meta.OPS]}:\n"
        "    print(getattr(torch.ops.moelora, name).default._schema)\n"
        "try:\n    import moelora_ops\nexcept ImportError as error:\n    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    *schemas, error = done.stdout.splitlines()
    assert schemas == [str(getattr(torch.ops.moelora, op.NAME).default._schema) for op in meta.OPS]
    assert error == f"moelora::{meta.OPS[0].NAME} is defined already: _C_schemas is for processes without moelora_ops"


@NEEDS_NATIVE
def test_schemas_after_the_package_change_nothing() -> None:
    """The other order prints a line, and the ops work on."""
    library, _ = native.runtime_libraries()
    done = python(
        f"import torch, moelora_ops; torch.ops.load_library({str(library)!r})\n"
        "ids = torch.zeros(1, 1).int(); print(moelora_ops.moe_lora_align_block_size(ids, ids[0], 1, 1, 1)[2])"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "tensor([1], dtype=torch.int32)"), done.stderr
    assert "an op is defined already" in done.stderr
