"""Compile what the Triton sorts launch, for a GPU that is not there: `python aot_compile.py CAPABILITY CASE`.

The launchers run on CPU tensors, under a driver that only names the target and with every launch turned into its compilation:
types, specialisations and options are the ones of a real call. Needs a process without TRITON_INTERPRET. Prints a line per
launch: kernel, hash of what was compiled, bytes of shared memory, number of waits for the kernel before.
"""

import importlib
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from moelora_ops.routing import RoutingSizes
from moelora_ops.testing.cases import Case

LAYER = Case("layer", num_tokens=40, num_experts=8, top_k=4, hidden_size=256, intermediate_size=128, dtype=torch.bfloat16)


def variants():
    """Both id types, with and without the optional tensors."""
    for ids in (torch.int32, torch.int64):
        yield LAYER.like(ids_dtype=ids).make()
        yield LAYER.like(ids_dtype=ids, disabled=(1,), num_global_experts=12).make()


def align():
    for inputs in variants():
        args, kwargs = inputs.align()
        launcher("align").moe_lora_align_block_size(*args, **kwargs)


def route():
    for inputs in variants():
        routing_of(inputs)


def routing_of(inputs):
    case = inputs.case
    sizes = RoutingSizes.of(case.num_pairs, case.num_experts, case.max_loras, case.max_lora_rank, 16, 16)
    names = ("topk_ids", "token_lora_mapping", "lora_ranks", "adapter_enabled", "expert_map")
    tables = inputs.topk_ids.new_empty(sizes.size, dtype=torch.int32)
    launcher("route").triton_route(**{name: getattr(inputs, name) for name in names}, tables=tables, sizes=sizes)


def sorts_of_any_size():
    """Whatever the batch and the alignment of the ids, the same compiled kernels."""
    for num_tokens in (1, 2, 3, 4, 15, 16, 17, 64, 128, 512, 1024):
        inputs = LAYER.like(num_tokens=num_tokens + 1).make()
        inputs = inputs.replace(topk_ids=inputs.topk_ids[1:], token_lora_mapping=inputs.token_lora_mapping[1:])
        for block_size in (1, 16, 24, 64):
            launcher("align").moe_lora_align_block_size(*inputs.align(block_size)[0])
        routing_of(inputs)


CASES = {case.__name__: case for case in (align, route, sorts_of_any_size)}


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
    """The launcher's module, choosing dependent launch as on the target."""
    module = importlib.import_module(f"moelora_ops.kernels.triton.{name}")
    pdl = {"launch_pdl": True} if triton.runtime.driver.active.get_current_target().arch >= 90 else {}
    module.pdl_options = lambda device: pdl
    return module


def compile_instead_of_launching():
    run = triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        print(self.fn.__name__, kernel.hash, kernel.metadata.shared, kernel.asm["ptx"].count("griddepcontrol.wait"), flush=True)
        return kernel

    triton.JITFunction.run = compile_only


if __name__ == "__main__":
    triton.runtime.driver.set_active(CompileOnlyDriver(int(sys.argv[1])))
    compile_instead_of_launching()
    CASES[sys.argv[2]]()
