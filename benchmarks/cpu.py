"""The expert layer on a CPU against transformers' experts implementations and PEFT, in one run (`make bench-cpu`).

Every contender's values are checked against the fp64 reference before anything is timed. Rounds are interleaved, so that noise
hits all contenders alike, and each call takes the next of several routings, so that weights come from memory and not from a
cache. The floor is the active experts' bytes over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor, nn

import moelora_ops
from moelora_ops import reference
from moelora_ops.testing.numerics import TOLERANCES, Tolerance, assert_close
from moelora_ops.testing.oracle import exact

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 64, 1024, 384, 8
MAX_LORAS, RANK = 8, 16
PEERS = ("eager", "grouped_mm", "batched_mm")
NUM_ROUTINGS = 7  # coprime to the number of contenders: every contender gets every routing
PEER_BARS = {1: 1.7, 8: 1.7, 64: 2.0}


@dataclass
class Routing:
    hidden_states: Tensor  # [T, H]
    topk_weights: Tensor  # [T, K] fp32
    topk_ids: Tensor  # [T, K]
    token_lora_mapping: Tensor  # [T], a random slot per token


@dataclass
class Contender:
    name: str
    run: Callable[[Routing], Tensor]
    exact: Callable[[Routing], Tensor]  # the same on fp64


@dataclass
class Layer:
    """One expert layer with a pool of adapters, all weights random and signed."""

    w13: Tensor
    w2: Tensor
    lora: dict[str, Tensor]

    @classmethod
    def random(cls, dtype: torch.dtype) -> Layer:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype)

        return cls(
            w13=randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            w2=randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
            lora={
                "lora_a13": randn(MAX_LORAS, NUM_EXPERTS, 2 * RANK, HIDDEN),
                "lora_b13": randn(MAX_LORAS, NUM_EXPERTS, 2 * INTERMEDIATE, RANK),
                "lora_a2": randn(MAX_LORAS, NUM_EXPERTS, RANK, INTERMEDIATE),
                "lora_b2": randn(MAX_LORAS, NUM_EXPERTS, HIDDEN, RANK),
            },
        )

    def ours(self, name: str, lora: dict[str, Tensor]) -> Contender:
        def call(r: Routing) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            none = dict.fromkeys(self.lora)
            args = (r.hidden_states, self.w13, self.w2, r.topk_weights, r.topk_ids, r.token_lora_mapping)
            return args, {**none, **lora}

        def run(r: Routing) -> Tensor:
            args, kwargs = call(r)
            return moelora_ops.fused_experts_lora(*args, **kwargs)

        return Contender(name, run, lambda r: exact(reference.fused_experts_lora, call(r)))


def routings(num_tokens: int, dtype: torch.dtype) -> list[Routing]:
    generator = torch.Generator().manual_seed(num_tokens)
    made = []
    for _ in range(NUM_ROUTINGS):
        scores = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
        topk_weights, topk_ids = scores.softmax(-1).topk(TOP_K)
        mapping = torch.randint(0, MAX_LORAS, (num_tokens,), generator=generator, dtype=torch.int32)
        x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
        made.append(Routing(x, topk_weights / topk_weights.sum(-1, keepdim=True), topk_ids, mapping))
    return made


def transformers_experts(layer: Layer, implementation: str) -> nn.Module:
    """transformers' own Qwen3-MoE experts module over the same weights (not a copy)."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K,
        experts_implementation=implementation,
    )  # fmt: skip
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = nn.Parameter(layer.w13, requires_grad=False)
    module.down_proj = nn.Parameter(layer.w2, requires_grad=False)
    return module


def transformers_contender(layer: Layer, implementation: str, base: Contender) -> Contender:
    module = transformers_experts(layer, implementation)
    return Contender(implementation, lambda r: module(r.hidden_states, r.topk_ids, r.topk_weights), base.exact)


def peft_contender(layer: Layer) -> Contender:
    """PEFT's `target_parameters` on both projections of all experts, one adapter."""
    import peft

    parent = nn.Module()
    parent.experts = transformers_experts(layer, "grouped_mm")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_parameters=targets, init_lora_weights=False)
    torch.manual_seed(0)
    experts = peft.inject_adapter_in_model(config, parent).experts
    change = {}
    wrapper = experts
    while hasattr(wrapper, "parameter_name"):  # one wrapper a parameter, nested
        for matrix in (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()):
            nn.init.normal_(matrix.data, std=0.1)
            matrix.data = matrix.data.to(layer.w13.dtype)
            matrix.requires_grad_(False)
        change[wrapper.parameter_name] = wrapper
        wrapper = wrapper.base_layer

    def merged(r: Routing) -> Tensor:
        w13, w2 = (
            weight.double() + change[name].get_delta_weight("default").double()
            for name, weight in (("gate_up_proj", layer.w13), ("down_proj", layer.w2))
        )
        none = torch.full_like(r.token_lora_mapping, -1)
        args = (r.hidden_states.double(), w13, w2, r.topk_weights.double(), r.topk_ids, none, None, None, None, None)
        return reference.fused_experts_lora(*args)

    return Contender("PEFT", lambda r: experts(r.hidden_states, r.topk_ids, r.topk_weights), merged)


def check(contender: Contender, routing: Routing) -> None:
    """Peers round each intermediate and (eager) the sum over k to the input dtype: four times our tolerance."""
    tolerance = TOLERANCES[routing.hidden_states.dtype]
    if contender.name in (*PEERS, "PEFT"):
        tolerance = Tolerance(4 * tolerance.max, 4 * tolerance.rms)
    assert_close(contender.run(routing), contender.exact(routing), tolerance, what=contender.name)


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def measure(contenders: list[Contender], sets: list[Routing], rounds: int) -> dict[str, list[float]]:
    """Times of each contender; the first round is not counted."""
    order = itertools.cycle(sets)
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for round_idx in range(rounds + 1):
        for contender in contenders:
            routing = next(order)
            elapsed = milliseconds(lambda: contender.run(routing))
            if round_idx > 0:
                times[contender.name].append(elapsed)
    return times


def copy_bandwidth() -> float:
    """Bytes read and written per ms by a large copy."""
    source, target = torch.ones(1 << 26), torch.empty(1 << 26)  # 256 MB each
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(milliseconds(lambda: target.copy_(source)) for _ in range(9))


def floor(sets: list[Routing], layer: Layer, bandwidth: float) -> float:
    experts = statistics.mean(len(r.topk_ids.unique()) for r in sets)
    return experts * (layer.w13[0].nbytes + layer.w2[0].nbytes) / bandwidth


def report(dtype: torch.dtype, num_tokens: int, floor_ms: float, times: dict[str, list[float]]) -> str:
    median = {name: statistics.median(t) for name, t in times.items()}
    base, lora, peer = median["base"], median["8 adapters"], min(median[name] for name in PEERS)
    cells = [str(dtype).removeprefix("torch."), str(num_tokens), f"{floor_ms:.2f}"]
    cells += [f"{median[name]:.2f} ({min(times[name]):.2f})" for name in ("base", "8 adapters", *PEERS)]
    cells += [f"{median['PEFT']:.0f}" if "PEFT" in median else "–"]
    cells += [f"{peer / base:.2f} (≥ {PEER_BARS.get(num_tokens, 1.0)})"]
    cells += [f"{lora / base:.2f} (≤ 1.25)", f"{base / floor_ms:.2f}"]
    cells += [f"{median['PEFT'] / base:.0f} (≥ 50)" if "PEFT" in median else "–"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="timed rounds a cell (default 31)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--no-peft", action="store_true", help="leave out PEFT (it takes seconds a call in bf16)")
    options = parser.parse_args()
    torch.set_grad_enabled(False)

    bandwidth = copy_bandwidth()
    print(f"E={NUM_EXPERTS} H={HIDDEN} I={INTERMEDIATE} K={TOP_K}, {MAX_LORAS} adapters r={RANK}, one random adapter a token")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, ", end="")
    print(f"{torch.backends.cpu.get_cpu_capability()}, copy {bandwidth / 1e6:.1f} GB/s, load {os.getloadavg()[0]:.1f}")
    print("ms: median (minimum) of interleaved rounds, weights cold")
    head = ["dtype", "T", "floor", "base", "8 adapters", *PEERS, "PEFT", "best peer / base", "adapters / base", "base / floor"]
    print("| " + " | ".join([*head, "PEFT / base"]) + " |\n" + "|---" * (len(head) + 1) + "|")
    for dtype in (getattr(torch, name) for name in options.dtypes):
        layer = Layer.random(dtype)
        base = layer.ours("base", {})
        contenders = [base, layer.ours("8 adapters", layer.lora)]
        contenders += [transformers_contender(layer, name, base) for name in PEERS]
        peft = None if options.no_peft else peft_contender(layer)
        for num_tokens in options.tokens:
            sets = routings(num_tokens, dtype)
            for contender in contenders:
                check(contender, sets[0])
            times = measure(contenders, sets, options.rounds)
            if peft is not None and num_tokens == 1:
                check(peft, sets[0])
                times |= measure([peft], sets, 3)
            print(report(dtype, num_tokens, floor(sets, layer, bandwidth), times), flush=True)


if __name__ == "__main__":
    main()
