"""The library's main job on whatever machine this is, checked at every step.

A small Mixture-of-Experts decoder (random weights) serves a batch of sequences, each with its own adapter or none. Three
adapters of different rank are written to disk as PEFT writes them and loaded back. The decode loop is compiled with
fullgraph=True, on a GPU also captured in a CUDA graph; halfway one adapter is swapped for another, in place. Every step is
compared with the eager reference in fp64. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Sequence

import torch
from torch import Tensor

from .. import FusedMoEWithLoRA, LoraAdapter, LoraPool, load_adapter, reference
from .decoder import Decoder, num_compiled_graphs
from .demo_adapters import Factors, random_factors, stack, write_fused, write_per_expert
from .env import cpu_backend, cuda_backend
from .tiny_model import CONFIG, Experts, MakeExperts, TinyMoE, random_weights

NAME = "demo"
HELP = "run a tiny MoE model with several adapters here, and check every step"

RANKS = (4, 8, 16)
SLOTS = (0, 1, 2, -1, 0, 1, 2, -1)  # adapter slot of each sequence, -1 none
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Largest error of a row of logits, relative to what the adapters change in it. fp32 sees summation order alone (1e-6 measured);
# bf16 rounds every activation of three layers to 8 bits, the eager reference in bf16 included (2e-2 measured for both).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
LEAST_EFFECT = 0.2  # of a row of logits: what a lost adapter would leave out stands far above the tolerance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument(
        "--steps", type=_steps, default=16, help="tokens decoded per sequence, at least 2 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, adapters and start tokens (default: %(default)s)")
    parser.add_argument(
        "--backend",
        choices=("inductor", "aot_eager", "eager"),
        help="of torch.compile; default: inductor, aot_eager without a compiler",
    )


def run(options: argparse.Namespace) -> int:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    backend = options.backend or _default_backend(device)
    served_by = (cuda_backend if device.type == "cuda" else cpu_backend)("fused_experts_lora")
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device_name}; {str(dtype).removeprefix('torch.')}; expert layers: {served_by}; torch.compile: {backend}")
    print(
        f"{CONFIG['num_hidden_layers']} layers of {CONFIG['num_experts']} experts; {len(SLOTS)} sequences; 3 adapters, ranks "
        f"{', '.join(map(str, RANKS))}; {options.steps} steps, before step {options.steps // 2} slot 0 is swapped"
    )
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        return _demo(Path(folder), device, dtype, backend, options.steps, options.seed)


def _demo(folder: Path, device: torch.device, dtype: torch.dtype, backend: str, steps: int, seed: int) -> int:
    factors = [random_factors(rank, seed + rank, shared_a=rank == RANKS[-1]) for rank in RANKS]
    adapters = _through_disk(folder, factors)
    pool = LoraPool.from_config(CONFIG, max_loras=len(RANKS), max_rank=max(RANKS), dtype=dtype, device=device)

    def load_before(step: int) -> None:
        if step == 0:
            for slot, adapter in enumerate(adapters):
                pool.load(adapter, slot)
        elif step == steps // 2:
            pool.load(adapters[-1], 0)

    weights = random_weights(seed, dtype, device)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    start = torch.randint(CONFIG["vocab_size"], slots.shape, generator=torch.Generator().manual_seed(seed)).to(device)

    def decoder(weights: dict[str, Tensor], make_experts: MakeExperts) -> Decoder:
        return Decoder(TinyMoE(weights, make_experts, batch=len(slots), max_length=steps), slots)

    graphs = [num_compiled_graphs()]
    fused = decoder(weights, lambda i, w13, w2: FusedMoEWithLoRA(w13, w2, pool.layer(i)))
    base = decoder(weights, lambda i, w13, w2: FusedMoEWithLoRA(w13, w2))
    for one in (fused, base):
        one.compile(backend)
        if device.type == "cuda":
            one.capture()
    graphs.append(num_compiled_graphs())
    live = fused.generate(start, steps, load_before)
    base_logits = base.follow(live)
    graphs.append(num_compiled_graphs())

    meant = _Meant(factors, steps // 2)
    eager = decoder(weights, meant.experts)
    eager_logits = eager.follow(live, meant.before_step)
    weights64 = {name: weight.double() for name, weight in weights.items()}
    exact = decoder(weights64, meant.experts).follow(live, meant.before_step)
    effect = _rms(exact - decoder(weights64, _Meant([], steps).experts).follow(live))
    adapted, plain = slots >= 0, slots < 0

    def error(logits: Tensor) -> float:
        return float((_rms(logits - exact) / effect)[:, adapted].max())

    print(f"\n{'':17}{'tokens/s':>10}   largest error, relative to what the adapters change")
    print(f"{'no adapters':17}{base.tokens_per_second(start, steps, repeats=3):10.0f}   -")
    print(f"{'eager reference':17}{eager.tokens_per_second(start, steps, repeats=1):10.0f}   {error(eager_logits):.1e}")
    print(f"{'fused':17}{fused.tokens_per_second(start, steps, repeats=3):10.0f}   {error(live.logits):.1e}\n")

    size, tolerance = _rms(exact), TOLERANCE[dtype]
    least_effect = float((effect / size)[:, adapted].min())
    plain_error = float((_rms(live.logits - exact) / size)[:, plain].max())
    once = "compiled, and captured in a CUDA graph, once" if device.type == "cuda" else "compiled once"
    within = f"every step within {tolerance:.0e} of the fp64 reference"
    checks = {
        f"with an adapter: {within} ({error(live.logits):.1e})": error(live.logits) <= tolerance,
        f"without one: {within} ({plain_error:.1e})": plain_error <= tolerance,
        f"the adapters change every step by {least_effect:.0%} or more": least_effect >= LEAST_EFFECT,
        "without an adapter: the same bits as the model without adapters": torch.equal(
            live.logits[:, plain], base_logits[:, plain]
        ),
        f"{graphs[1] - graphs[0]} models, each {once}": graphs[1] - graphs[0] == 2,
        f"recompiled {graphs[2] - graphs[1]} times over {steps} steps and a swap": graphs[2] == graphs[1],
    }
    for what, passed in checks.items():
        print(f"{'ok  ' if passed else 'FAIL'}  {what}")
    return 0 if all(checks.values()) else 1


def _through_disk(folder: Path, factors: Sequence[Factors]) -> list[LoraAdapter]:
    """Write each adapter in a format that can hold it, and load it back."""
    adapters = []
    for i, f in enumerate(factors):
        write = write_fused if f.gate_a is f.up_a else write_per_expert
        write(folder / f"adapter{i}", f)
        adapters.append(load_adapter(folder / f"adapter{i}", CONFIG))
    return adapters


class _Meant:
    """Expert layers by the reference, with the factors as they were made: neither the loader nor the pool is in it."""

    def __init__(self, factors: Sequence[Factors], swap_at: int) -> None:
        self._phases = (factors, (*factors[-1:], *factors[1:]))
        self._swap_at = swap_at
        self._phase = 0

    def before_step(self, step: int) -> None:
        self._phase = int(step >= self._swap_at)

    def experts(self, layer: int, w13: Tensor, w2: Tensor) -> Experts:
        phases = [stack(factors, layer, w13.dtype, w13.device) for factors in self._phases]

        def run(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, slots: Tensor) -> Tensor:
            adapters = phases[self._phase]
            return reference.fused_experts_lora(hidden_states, w13, w2, topk_weights, topk_ids, slots, **adapters)

        return run


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _default_backend(device: torch.device) -> str:
    """Inductor, except on a CPU without the C++ compiler that it needs."""
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "aot_eager"
    return "inductor"


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2 (the swap is halfway), got {steps}")
    return steps
