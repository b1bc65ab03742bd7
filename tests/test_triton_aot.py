"""The kernels of both ops compile for real devices, without one: what the launchers would launch, at real sizes, from meta tensors.

Compilation needs Triton without its interpreter, so it runs in a process of its own (this file as a script).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may use
CASES = [
    # capability, num_tokens, dtype, model, pool's rank
    (80, 1, "bfloat16", "qwen", 16),
    (80, 2048, "bfloat16", "qwen", 64),
    (90, 1, "bfloat16", "qwen", 16),
    (90, 512, "bfloat16", "qwen", 16),
    (90, 2048, "bfloat16", "qwen", 16),
    (90, 2048, "float16", "gpt-oss", 64),
    (90, 128, "bfloat16", "mixtral", 16),
    (90, 2048, "float32", "qwen", 16),
    (100, 1, "bfloat16", "gpt-oss", 12),
    (100, 2048, "bfloat16", "qwen", 16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_and_fits(case: tuple[Any, ...]) -> None:
    """Every kernel compiles, stays within the device's shared memory, and spills no registers."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__, json.dumps(case)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    names = {entry["name"] for entry in report}
    assert names >= {"shrink_kernel", "gate_up_kernel", "down_kernel", "combine_kernel", "delta_shrink_kernel", "delta_expand_kernel"}
    for entry in report:
        assert entry["shared"] <= SHARED_MEMORY[case[0]], entry
        assert entry["spill_bytes"] == 0, entry
        assert entry["dependent_launch"] == (case[0] >= 90), entry
        assert not entry["wgmma_from_registers"], entry  # ptxas before 13.3 may overwrite them too early (_lora.py)


def _record_launches(capability: int, num_tokens: int, dtype: torch.dtype, model: str, rank: int) -> list[tuple[Any, Any, Any]]:
    """(kernel, args, kwargs) of all that one call of each op launches."""
    from triton.runtime.jit import JITFunction

    from moelora_ops.kernels import config
    from moelora_ops.kernels.triton import _common, delta, experts, route

    launches: list[tuple[Any, Any, Any]] = []
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append((self, args, kwargs))  # type: ignore[method-assign]
    pdl = {"launch_pdl": True} if capability >= 90 else {}
    for module in (_common, delta, experts, route):
        module.pdl_options = lambda device: pdl  # type: ignore[attr-defined]
    config.describe = lambda device: config.Device("target", SHARED_MEMORY[capability])  # type: ignore[assignment]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e, h, i, k = {"qwen": (128, 2048, 768, 8), "mixtral": (8, 4096, 14336, 2), "gpt-oss": (32, 2880, 2880, 4)}[model]
    biased = model == "gpt-oss"
    ids, weights = empty(num_tokens, k, dtype=torch.int32), empty(num_tokens, k, dtype=torch.float32)
    mapping, ranks = empty(num_tokens, dtype=torch.int32), empty(8, dtype=torch.int32)
    a13, b13, a2, b2 = empty(8, e, 2 * rank, h), empty(8, e, 2 * i, rank), empty(8, e, rank, i), empty(8, e, h, rank)
    layer = (empty(num_tokens, h), empty(e, 2 * i, h), empty(e, h, i), weights, ids, mapping)
    options: dict[str, Any] = {"activation": "gelu", "lora_ranks": ranks}
    if biased:
        options = {"activation": "swigluoai", "interleaved": True, "swiglu_limit": 7.0, "lora_ranks": ranks}
        options |= {"w13_bias": empty(e, 2 * i), "w2_bias": empty(e, h)}
    experts.fused_experts_lora(*layer, a13, b13, a2, b2, **options)
    experts.fused_experts_lora(*layer, None, None, None, None)
    table = (empty(8, 4096, dtype=torch.int32), empty(8, 64, dtype=torch.int32), empty(8, dtype=torch.int32))
    x, output = empty(num_tokens, h), empty(num_tokens, k, 2 * i)
    delta.fused_moe_lora(output, x, list(a13.chunk(2, 2)), list(b13.chunk(2, 2)), weights, *table, lora_ranks=ranks)
    delta.fused_moe_lora(empty(num_tokens, k, h), empty(num_tokens * k, i), [a2], [b2], weights, *table, mul_routed_weight=True)
    return launches


TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> Any:
    """Compile a launch the way Triton's launcher specialises it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = dict(zip(kernel.arg_names, args)) | {n: v for n, v in kwargs.items() if n in kernel.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for at, param in enumerate(kernel.params):
        value = values[param.name]
        divisible = False
        if isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            divisible = not param.do_not_specialize_on_alignment
        elif param.is_constexpr or value is None or (value is not True and value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0 and not param.do_not_specialize
        if divisible:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _spills(ptx: str, capability: int) -> tuple[int, int]:
    """(registers, bytes spilled) as ptxas counts them."""
    import re
    import tempfile

    from triton.backends.nvidia.compiler import get_ptxas

    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", str(path), "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))


def main(capability: int, num_tokens: int, dtype: str, model: str, rank: int) -> None:
    report, seen = [], set()
    for kernel, args, kwargs in _record_launches(capability, num_tokens, getattr(torch, dtype), model, rank):
        name = kernel.fn.__name__
        if name.startswith("_"):  # the routing kernels have tests of their own
            continue
        compiled = _compile(kernel, args, kwargs, capability)
        if compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        registers, spilled = _spills(compiled.asm["ptx"], capability)
        report.append(
            {
                "name": name,
                "shared": compiled.metadata.shared,
                "registers": registers,
                "spill_bytes": spilled,
                "dependent_launch": "griddepcontrol.wait" in compiled.asm["ptx"],
                "wgmma_from_registers": any("warp_group_dot " in t and "dot_op" in t for t in compiled.asm["ttgir"].splitlines()),
                "threads": 32 * compiled.metadata.num_warps,
            }
        )
        if os.environ.get("SHOW"):
            Path(os.environ["SHOW"], f"{name}{len(report)}.ttgir").write_text(compiled.asm["ttgir"])
    print(json.dumps(report))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
