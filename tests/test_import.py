"""What `import moelora_ops` does and does not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, cwd: Path, **environment: str) -> str:
    """Standard output of a fresh interpreter that finds this checkout first."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing and running is silent"
    return done.stdout.strip()


LIGHT = """
import sys, torch
before = set(sys.modules)
import moelora_ops
new = {name.partition(".")[0] for name in set(sys.modules) - before}
banned = {"triton", "transformers", "peft", "hypothesis", "pytest", "torchvision"} & new
assert not banned, banned
assert not torch.cuda.is_initialized()
assert "torch._inductor" not in set(sys.modules) - before and "torch._dynamo" not in set(sys.modules) - before
print(*sorted(moelora_ops.__all__))
"""


def test_is_light(tmp_path: Path) -> None:
    """Importing, from any folder, loads no Triton, no model library and no compiler, and initialises no GPU."""
    names = python(LIGHT, tmp_path).split()
    assert {"fused_experts_lora", "fused_moe_lora", "moe_lora_align_block_size", "AdapterError"} <= set(names)


def test_starts_no_process_and_writes_no_file(tmp_path: Path) -> None:
    """Nothing is compiled on import: no subprocess starts, no file is opened for writing, no cache folder appears."""
    code = """
import sys, torch
def watch(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
        raise RuntimeError(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and ".pyc" not in str(args[0]):
        raise RuntimeError(f"opened {args[0]} for writing")
sys.addaudithook(watch)
import moelora_ops
print("quiet")
"""
    assert python(code, tmp_path, HOME=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton")) == "quiet"
    assert list(tmp_path.iterdir()) == []


def test_registers_the_ops(tmp_path: Path) -> None:
    """`import moelora_ops` alone makes torch.ops.moelora.* callable, with the argument names of the contract in order."""
    code = """
import torch, moelora_ops
for name in ("moe_lora_align_block_size", "fused_moe_lora", "fused_experts_lora"):
    print(name, *(a.name for a in getattr(torch.ops.moelora, name).default._schema.arguments))
"""
    assert python(code, tmp_path).splitlines() == [
        "moe_lora_align_block_size topk_ids token_lora_mapping num_experts block_size max_loras adapter_enabled expert_map",
        "fused_moe_lora output hidden_states lora_a_stacked lora_b_stacked topk_weights sorted_token_ids expert_ids "
        "num_tokens_post_padded lora_ranks mul_routed_weight offset",
        "fused_experts_lora hidden_states w13 w2 topk_weights topk_ids token_lora_mapping lora_a13 lora_b13 lora_a2 lora_b2 "
        "lora_ranks adapter_enabled w13_bias w2_bias expert_map activation gated interleaved swiglu_alpha swiglu_limit "
        "apply_router_weight_on_input routed_scaling_factor",
    ]


RESULTS = """
import torch, moelora_ops
from moelora_ops.kernels import native
from moelora_ops.testing.cases import CASES
results = []
for case in CASES:
    inputs = case.make()
    args, kwargs = inputs.experts()
    results.append(moelora_ops.fused_experts_lora(*args, **kwargs))
    args, kwargs = inputs.align(8)
    aligned = moelora_ops.moe_lora_align_block_size(*args, **kwargs)
    output = torch.zeros(case.num_tokens, case.top_k, case.hidden_size)
    x = torch.linspace(-1, 1, case.num_pairs * case.intermediate_size).view(-1, case.intermediate_size)
    moelora_ops.fused_moe_lora(output, x, *inputs.down_lora(), inputs.topk_weights, *aligned, lora_ranks=inputs.lora_ranks)
    results += [output, *aligned]
torch.save(results, "results.pt")
print(native.CPU_MISSING)
"""


def test_works_without_the_extension(tmp_path: Path) -> None:
    """MOELORA_DISABLE_NATIVE=1 serves every case through the reference, with the values of the compiled kernels."""
    import torch

    from moelora_ops.kernels import native
    from moelora_ops.testing.cases import CASES
    from moelora_ops.testing.numerics import TOLERANCES, assert_close

    found = {}
    for flag in ("0", "1"):
        folder = tmp_path / flag
        folder.mkdir()
        reason = python(RESULTS, folder, MOELORA_DISABLE_NATIVE=flag)
        assert reason == ("switched off by MOELORA_DISABLE_NATIVE" if flag == "1" else native.CPU_MISSING)
        found[flag] = torch.load(folder / "results.pt")
    assert len(found["0"]) == len(found["1"]) == 5 * len(CASES)
    for with_native, without in zip(found["0"], found["1"]):
        if with_native.is_floating_point():
            assert_close(with_native, without, TOLERANCES[torch.float32])
        else:
            assert torch.equal(with_native, without)


def test_meta_is_not_a_top_level_package(tmp_path: Path) -> None:
    """Importing the folder meta/ by itself is refused: it would register the schemas twice."""
    code = """
import moelora_ops
try:
    import meta
except ImportError as error:
    print(error)
"""
    assert "import this package as moelora_ops.meta" in python(code, tmp_path)


@pytest.mark.parametrize("module", [f"moelora_ops.{name}" for name in ("testing.cases", "meta", "reference", "kernels")])
def test_submodules_import_alone(module: str, tmp_path: Path) -> None:
    """Every entry to the package is a first import."""
    assert python(f"import {module}; print('ok')", tmp_path) == "ok"
