"""Tokens per second of `generate`: our mixed adapters against none, transformers' own experts and PEFT, in one run.

    python -m benchmarks.generate                      # Qwen3-30B-A3B's layers, 4 of them, random bf16 weights, batch 1 and 8
    python -m benchmarks.generate --static             # with a static cache, whose decode step transformers compiles on a GPU
    python -m benchmarks.generate --attention          # the adapters are on q, k, v and o as well

Every contender's logits are checked before anything is timed; rounds are interleaved; after `--seconds` no more begin, but one
of each batch runs. PEFT is given what it supports for fused experts, `target_parameters`, and on a CPU fewer tokens: it makes
the dense change of every expert's weights in each forward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any, Callable

import peft
import torch
import transformers
from torch import Tensor

from moelora_ops import LoraAdapter, load_adapter
from moelora_ops.adapters import ProjectionLora
from moelora_ops.integrations.transformers import EnabledModel, enable

SHAPES = {
    "qwen3-30b": dict(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, vocab_size=151936,
    ),
    "tiny": dict(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=128, vocab_size=512,
    ),
}  # fmt: skip
OWN = ("grouped_mm", "batched_mm", "eager")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_ADAPTERS, RANK = 8, 16
# Of the RMS of the logits: bf16 rounds every activation, in another order for each contender, and may choose other experts.
TOLERANCE = 0.1


@dataclass
class Contender:
    name: str
    run: Callable[[Callable[[], Any]], Any]  # calls what it is given with its own experts and adapters in place
    tokens: int


def random_model(options: argparse.Namespace) -> Any:
    config = transformers.Qwen3MoeConfig(
        **SHAPES[options.shapes], num_hidden_layers=options.layers, norm_topk_prob=True, bos_token_id=0, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.device(options.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def peft_model(model: Any, attention: bool) -> Any:
    """One adapter as PEFT has it, random values of a size that matters."""
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules=list(ATTENTION) if attention else [],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted.eval()


def another(adapter: LoraAdapter, seed: int) -> LoraAdapter:
    """The same shape with other values, on the experts alone."""
    generator = torch.Generator().manual_seed(seed)

    def like(p: ProjectionLora) -> ProjectionLora:
        a, b = (torch.randn(t.shape, generator=generator).mul_(0.02).to(t.dtype) for t in (p.a, p.b))
        return ProjectionLora(a, b, p.scaling)

    layers = {layer: {name: like(p) for name, p in parts.items()} for layer, parts in adapter.layers.items()}
    return LoraAdapter(f"random {seed}", adapter.geometry, layers)


def contenders(model: Any, enabled: EnabledModel, batch: int, options: argparse.Namespace) -> list[Contender]:
    def own(implementation: str) -> Callable[[Callable[[], Any]], Any]:
        def run(call: Callable[[], Any]) -> Any:
            model.set_experts_implementation(implementation)
            result = call()
            model.set_experts_implementation("moelora")
            return result

        return run

    def ours(names: list[str | None]) -> Callable[[Callable[[], Any]], Any]:
        def run(call: Callable[[], Any]) -> Any:
            with enabled.adapters(names):
                return call()

        return run

    mixed: list[str | None] = [str(i % NUM_ADAPTERS) for i in range(batch)]
    made = [Contender("8 adapters", ours(mixed), options.tokens), Contender("none", ours([None] * batch), options.tokens)]
    made += [Contender(name, own(name), options.tokens) for name in OWN]
    # batched_mm copies the weights of every pair of the prompts.
    shape = SHAPES[options.shapes]
    pair = 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 2
    fits = batch * options.prompt * shape["num_experts_per_tok"] * pair < (2**32 if options.device == "cpu" else 2**35)
    return [c for c in made if fits or c.name != "batched_mm"]


def logits(model: Any, ids: Tensor) -> Tensor:
    result: Tensor = model(ids, use_cache=False).logits[:, -1].float()
    return result


def check(name: str, got: Tensor, expected: Tensor) -> None:
    error = float((got - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: logits must be within {TOLERANCE} of the others', got {error:.3f}")


def tokens_per_second(model: Any, ids: Tensor, contender: Contender, settings: dict[str, Any]) -> float:
    def generate() -> Any:
        return model.generate(
            ids, max_new_tokens=contender.tokens, min_new_tokens=contender.tokens, do_sample=False, **settings
        )

    start = time.perf_counter()
    contender.run(generate)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return ids.shape[0] * contender.tokens / (time.perf_counter() - start)


def row(batch: int, speed: dict[str, list[float]]) -> str:
    median = {name: statistics.median(values) for name, values in speed.items()}
    best = max((name for name in OWN if name in median), key=lambda name: median[name])
    cells = [str(batch), str(len(speed["none"]))]
    cells += [f"{median[name]:.2f}" if name in median else "–" for name in ("8 adapters", "none", *OWN)]
    cells += [f"{median['PEFT']:.3f}" if "PEFT" in median else "–"]
    cells += [f"{median['8 adapters'] / median['none']:.2f} (≥ 0.9)"]
    cells += [f"{median[name] / median[best]:.2f}{bar}" for name, bar in (("none", " (≥ 1.0)"), ("8 adapters", ""))]
    cells += [f"{median['8 adapters'] / median['PEFT']:.0f} (≥ 10)" if "PEFT" in median else "–"]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-30b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, help="new tokens of each sequence (default 64, on a CPU 16)")
    parser.add_argument("--peft-tokens", type=int, help="of PEFT, batch 1 only; 0 leaves it out (default 64, on a CPU 2)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=45, help="for all rounds together (default %(default)s)")
    parser.add_argument("--attention", action="store_true", help="adapters on attention too")
    parser.add_argument("--static", action="store_true", help="static cache")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    options.tokens = options.tokens or (64 if on_gpu else 16)
    options.peft_tokens = (options.tokens if on_gpu else 2) if options.peft_tokens is None else options.peft_tokens
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"cache_implementation": "static"} if options.static else {}
    model = random_model(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.shapes}, {options.layers} layers, bf16, {device}, load {os.getloadavg()[0]:.1f}; ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    print(f"{NUM_ADAPTERS} adapters r={RANK} on {'experts and attention' if options.attention else 'experts'}; ", end="")
    print(f"{options.prompt} + {options.tokens} tokens, {'static' if options.static else 'dynamic'} cache")

    def prompts(batch: int) -> Tensor:
        return torch.randint(0, 500, (batch, options.prompt), generator=torch.Generator().manual_seed(batch)).to(options.device)

    speed: dict[int, dict[str, list[float]]] = {batch: {} for batch in options.batches}
    with tempfile.TemporaryDirectory() as folder:
        own_experts = [layer.mlp.experts for layer in model.model.layers]
        adapted = peft_model(model, options.attention)
        adapted.save_pretrained(folder)
        expected = logits(adapted, prompts(1)) if options.peft_tokens else None
        if options.peft_tokens and 1 in options.batches:
            contender = Contender("PEFT", lambda call: call(), options.peft_tokens)
            if on_gpu:
                tokens_per_second(adapted, prompts(1), contender, settings)  # warms up
            speed[1]["PEFT"] = [tokens_per_second(adapted, prompts(1), contender, settings)]
        model = adapted.unload()
        for layer, experts in zip(model.model.layers, own_experts):
            layer.mlp.experts = experts  # unload leaves the inner one of two wrappers: everybody would merge in every forward
        enabled = enable(model, max_loras=NUM_ADAPTERS, max_rank=RANK, linears=ATTENTION if options.attention else ())
        enabled.load(folder, "0")
        if options.attention:
            for i in range(1, NUM_ADAPTERS):
                enabled.load(folder, str(i))  # the values do not matter to the clock
        else:
            first = load_adapter(folder, model.config)
            for i in range(1, NUM_ADAPTERS):
                enabled.load(another(first, i), str(i))
    if expected is not None:
        with enabled.adapters("0"):
            check("8 adapters", logits(model, prompts(1)), expected)
    head = [
        "batch",
        "rounds",
        "8 adapters",
        "none",
        *OWN,
        "PEFT, 1 adapter",
        "8 adapters / none",
        "none / best own",
        "8 adapters / best own",
    ]
    print("\ntokens/s, medians\n| " + " | ".join([*head, "8 adapters / PEFT"]) + " |\n" + "|---" * (len(head) + 1) + "|")
    start = time.perf_counter()
    for place, batch in enumerate(options.batches, 1):
        end = start + options.seconds * place / len(options.batches)
        made = contenders(model, enabled, batch, options)
        base = made[1].run(lambda: logits(model, prompts(batch)))
        for contender in made[1:]:
            check(contender.name, contender.run(lambda: logits(model, prompts(batch))), base)
        for i in range(options.rounds + 1):
            if i > 1 and time.perf_counter() > end:
                break
            for contender in made:
                value = tokens_per_second(model, prompts(batch), contender, settings)
                if i > 0:  # the first warms up
                    speed[batch].setdefault(contender.name, []).append(value)
        print(row(batch, speed[batch]), flush=True)


if __name__ == "__main__":
    main()
