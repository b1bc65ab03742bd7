"""The kernels of both ops compile for real devices, without one: what the launchers launch, at real sizes, on meta tensors.

Compilation needs Triton without its interpreter, so it runs in a process of its own (this file as a script, under the driver of
aot_compile.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may use
CASES = [
    # capability, num_tokens, dtype, model, pool's rank
    (80, 2048, "bfloat16", "qwen", 64),
    (90, 1, "bfloat16", "qwen", 16),
    (90, 512, "bfloat16", "qwen", 16),
    (90, 2048, "float16", "gpt-oss", 64),
    (90, 2048, "float32", "qwen", 16),
    (100, 1, "bfloat16", "gpt-oss", 12),
]


LAYER_KERNELS = {"shrink_kernel", "gate_up_kernel", "down_kernel", "combine_kernel"}
DIRECT_KERNELS = {"direct_shrink_kernel", "direct_gate_up_kernel", "direct_down_kernel", "combine_kernel"}
AGAIN_KERNELS = {"gate_up_again_kernel", "down_again_kernel"}  # beside tiles of 64 rows and more
DELTA_KERNELS = {"delta_shrink_kernel", "delta_expand_kernel"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_and_fits(case: tuple[Any, ...]) -> None:
    """Every kernel compiles, waits for its predecessor, stays within shared memory, and spills next to no registers."""
    num_tokens = case[1]
    report = _run_script("compile", *case)
    layer = DIRECT_KERNELS if num_tokens == 1 else LAYER_KERNELS
    again = AGAIN_KERNELS if num_tokens >= 128 else set()
    assert {entry["name"] for entry in report} == layer | again | DELTA_KERNELS
    for entry in report:
        assert entry["shared"] <= SHARED_MEMORY[case[0]], entry
        # A few addresses; a tile that does not fit costs kilobytes. What is done again is rare, so it may.
        assert entry["spill_bytes"] <= 256 or entry["name"] in AGAIN_KERNELS, entry
        assert (entry["waits"] > 0) == (case[0] >= 90), entry
        assert not entry["wgmma_from_registers"], entry  # ptxas before 13.3 may overwrite them too early (config.is_valid)


def test_number_of_variants_is_a_small_constant() -> None:
    """All batch sizes from 1 to 512, whatever the alignment of their views, need a handful of compiled kernels."""
    few = _run_script("variants", [1, 4, 16, 64, 128, 256, 512])
    assert few == _run_script("variants", [*range(1, 40), 100, 129, 200, 257, 400, 511])
    assert max(few.values()) <= 16, few


def test_parameters_of_the_layer_are_those_of_its_kernels() -> None:
    """A launch list passes what the compiled code declares, in number and size: pointers, scalars, tensor maps."""
    report = _run_script("parameters", 2048, "bfloat16", "gpt-oss", 16) + _run_script("parameters", 1, "bfloat16", "qwen", 16)
    assert {name for name, *_ in report} >= LAYER_KERNELS | DIRECT_KERNELS | AGAIN_KERNELS
    for name, passed, declared in report:
        assert passed == declared, name
    assert any(128 in passed for _, passed, _ in report)


def _run_script(*arguments: Any) -> Any:
    """The JSON that this file prints as a script."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, json.dumps(arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _target(capability: int) -> None:
    """Launchers choose tiles and launch options as on a device of this capability, and their launches compile only."""
    import triton
    from aot_compile import CompileOnlyDriver

    from moelora_ops.kernels import config
    from moelora_ops.kernels.triton import _launch, _plan, delta, experts

    triton.runtime.driver.set_active(CompileOnlyDriver(capability))
    for module in (_launch, _plan, delta):
        module.has_pdl = lambda device: capability >= 90  # type: ignore[attr-defined]
    _plan.has_copy_engine = lambda device: capability >= 90  # type: ignore[attr-defined]
    config.describe = lambda device: config.Device("target", SHARED_MEMORY[capability], capability >= 90)  # type: ignore[assignment]
    _launch.Launch.__call__ = lambda *_: None  # type: ignore[method-assign]  # it was compiled when it was made
    experts.route = _routing  # type: ignore[attr-defined]  # its kernels have tests of their own


def _routing(topk_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(tables=topk_ids.new_empty(16))


def _call_both_ops(num_tokens: int, dtype: torch.dtype, model: str, rank: int, *, start: int = 0) -> None:
    """One call of each op as a model makes it, on meta tensors; the batch is a view that begins at token `start`."""
    from moelora_ops.kernels.triton import delta, experts

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def batch(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return empty(start + num_tokens, *shape, dtype=dtype)[start:]

    e, h, i, k = {"qwen": (128, 2048, 768, 8), "mixtral": (8, 4096, 14336, 2), "gpt-oss": (32, 2880, 2880, 4)}[model]
    ids, weights, mapping = batch(k, dtype=torch.int32), batch(k, dtype=torch.float32), batch(dtype=torch.int32)
    ranks = empty(8, dtype=torch.int32)
    a13, b13, a2, b2 = empty(8, e, 2 * rank, h), empty(8, e, 2 * i, rank), empty(8, e, rank, i), empty(8, e, h, rank)
    layer = (batch(h), empty(e, 2 * i, h), empty(e, h, i), weights, ids, mapping)
    options: dict[str, Any] = {"activation": "gelu", "lora_ranks": ranks}
    if model == "gpt-oss":
        options = {"activation": "swigluoai", "interleaved": True, "swiglu_limit": 7.0, "lora_ranks": ranks}
        options |= {"w13_bias": empty(e, 2 * i), "w2_bias": empty(e, h)}
    experts.fused_experts_lora(*layer, a13, b13, a2, b2, **options)
    experts.fused_experts_lora(*layer, None, None, None, None)
    capacity = (num_tokens * k // 16 + e) * 16
    table = (empty(8, capacity, dtype=torch.int32), empty(8, capacity // 16, dtype=torch.int32), empty(8, dtype=torch.int32))
    slices = [list(t.chunk(2, 2)) for t in (a13, b13)]
    delta.fused_moe_lora(batch(k, 2 * i), batch(h), *slices, weights, *table, lora_ranks=ranks)
    delta.fused_moe_lora(batch(k, h), empty(num_tokens * k, i), [a2], [b2], weights, *table, mul_routed_weight=True)


def _compile(capability: int, num_tokens: int, dtype: str, model: str, rank: int) -> list[dict[str, Any]]:
    import triton

    _target(capability)
    report: dict[str, dict[str, Any]] = {}
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        ttgir, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
        registers, spilled = _registers(ptx, capability)
        report[kernel.hash] = {
            "name": self.fn.__name__,
            "shared": kernel.metadata.shared,
            "registers": registers,
            "spill_bytes": spilled,
            "waits": ptx.count("griddepcontrol.wait"),
            "wgmma_from_registers": any("warp_group_dot " in line and "dot_op" in line for line in ttgir.splitlines()),
        }

    triton.JITFunction.run = compile_only
    _call_both_ops(num_tokens, getattr(torch, dtype), model, rank)
    return list(report.values())


def _parameters(num_tokens: int, dtype: str, model: str, rank: int) -> list[tuple[str, list[int], list[int]]]:
    """(kernel, bytes of each parameter in a launch list, the same as declared in PTX) of each stage of the layer."""
    from collections import defaultdict

    from moelora_ops.kernels.triton import _launch

    _target(90)
    stages: list[Any] = []
    _launch.Launch.__call__ = lambda self, *_: stages.append(self)  # type: ignore[method-assign]
    _call_both_ops(num_tokens, getattr(torch, dtype), model, rank)
    report = []
    for stage in [stage for stage in stages if stage.names]:
        slots: Any = defaultdict(lambda: _launch.Slot(0))
        head = stage._compiled.asm["ptx"].partition(".entry")[2].partition("{")[0]
        kinds = re.findall(r"\.param (?:\.align \d+ )?\.([a-z])(\d+)[^\n\[]*(?:\[(\d+)\])?", head)
        declared = [int(count) if count else int(bits) // 8 for _, bits, count in kinds]
        report.append((stage._kernel.__name__, [size for size, _ in stage.parameters(slots)], declared))
    return report


def _registers(ptx: str, capability: int) -> tuple[int, int]:
    """(registers, bytes spilled) of a thread, as ptxas counts them."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", str(path), "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))


def _variants(sizes: list[int]) -> dict[str, int]:
    """Number of specialisations of each kernel over all batch sizes, without compiling any."""
    import triton

    _target(90)
    found: dict[str, set[str]] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def hook(*, key: Any, **_: Any) -> bool:
            found.setdefault(self.fn.__name__, set()).add(str(key))
            return True

        triton.knobs.runtime.jit_cache_hook = hook
        run(self, *args, grid=grid, warmup=True, **kwargs)

    run, triton.JITFunction.run = triton.JITFunction.run, record
    for num_tokens in sizes:
        _call_both_ops(num_tokens, torch.bfloat16, "qwen", 16, start=num_tokens % 3)
    return {name: len(keys) for name, keys in found.items()}


if __name__ == "__main__":
    mode, *arguments = json.loads(sys.argv[1])
    print(json.dumps({"compile": _compile, "parameters": _parameters, "variants": _variants}[mode](*arguments)))
