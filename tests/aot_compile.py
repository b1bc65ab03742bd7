"""Compile what the Triton launchers launch, for a GPU that is not there: `python aot_compile.py CAPABILITY CASE`.

The launchers run on CPU tensors, under a driver that only names the target and with every launch turned into its compilation: types,
specialisations and options are the ones of a real call. Needs a process without TRITON_INTERPRET. Prints a line per kernel.
"""

import importlib
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

import moelora_ops  # noqa: F401  (first: it places moelora_ops.meta)

T, K, E, L, R, H, I = 40, 4, 8, 3, 16, 256, 128


def align():
    for ids in (torch.int32, torch.int64):
        topk_ids, mapping = torch.zeros(T, K, dtype=ids), torch.zeros(T, dtype=ids)
        enabled = torch.ones(L, dtype=torch.bool if ids is torch.int32 else torch.int32)
        for optional in ({}, {"adapter_enabled": enabled, "expert_map": torch.arange(E, dtype=ids)}):
            launcher("align").moe_lora_align_block_size(topk_ids, mapping, E, 16, L, **optional)


def route():
    for ids in (torch.int32, torch.int64):
        topk_ids, mapping = torch.zeros(T, K, dtype=ids), torch.zeros(T, dtype=ids)
        for enabled, expert_map in ((None, None), (torch.ones(L, dtype=torch.bool), torch.arange(E, dtype=ids))):
            launcher("route").route(
                topk_ids, mapping, num_experts=E, max_loras=L, adapter_enabled=enabled, expert_map=expert_map, block_m=16, segment_m=16
            )


CASES = {case.__name__: case for case in (align, route)}


class CompileOnlyDriver:
    """Answers what the JIT asks before it launches."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def launcher(name):
    """The launcher module, choosing its launch options as on the target."""
    module = importlib.import_module(f"moelora_ops.kernels.triton.{name}")
    pdl = {"launch_pdl": True} if triton.runtime.driver.active.get_current_target().arch >= 90 else {}
    module.pdl_options = lambda device: pdl
    return module


def compile_instead_of_launching():
    run = triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(f"{self.fn.__name__}: {len(kernel.asm['cubin'])} bytes, {kernel.metadata.shared} bytes of shared memory")
        return kernel

    triton.JITFunction.run = compile_only


if __name__ == "__main__":
    triton.runtime.driver.set_active(CompileOnlyDriver(int(sys.argv[1])))
    compile_instead_of_launching()
    CASES[sys.argv[2]]()
