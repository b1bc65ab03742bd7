"""Tokens per second of `generate`: our mixed adapters against none, transformers' own experts and PEFT, in one run.

    python -m benchmarks.generate                      # Qwen3-30B-A3B's layers, 4 of them, random bf16 weights, batch 1 and 8
    python -m benchmarks.generate --no-compiled        # without the second block
    python -m benchmarks.generate --attention          # the adapters are on q, k, v and o as well

Two blocks: a dynamic cache and eager code; then, on a GPU, a static cache with the decode step compiled as transformers does by
itself (`mode="reduce-overhead"`: CUDA graphs), which is how one would serve. `--compiled` on a CPU checks that block's logic
with a backend that compiles nothing.

Every contender's logits are checked before anything is timed; rounds are interleaved. After `--seconds` no round of the first
block begins, but one of each batch runs. In the second no contender is compiled that would not be ready by `--limit`, counted
from the start, judged by the slowest so far: it gets a "–"; at the limit all ends. PEFT is given what it supports for fused
experts, `target_parameters`, and on a CPU fewer tokens: it makes the dense change of every expert's weights in each forward. It
is timed eager with either cache, of which the second block takes the better, and last of all compiled, if that works within
`--peft-seconds`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
COLUMNS = (
    "batch", "rounds", "8 adapters", "none", *OWN, "PEFT, 1 adapter", "8 adapters / none", "none / best own",
    "8 adapters / best own", "8 adapters / PEFT",
)  # fmt: skip
HEAD = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"
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


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt what runs for longer with a TimeoutError."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def static(options: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Settings of `generate` for a static cache."""
    settings: dict[str, Any] = {"cache_implementation": "static"}
    if not compiled:
        settings["disable_compile"] = True
    elif options.device == "cpu":  # transformers compiles by itself on a GPU alone
        settings["compile_config"] = transformers.CompileConfig(backend="eager", mode=None)
        settings["compile_config"]._compile_all_devices = True
    return settings


def time_peft(adapted: Any, ids: Tensor, options: argparse.Namespace, ways: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of PEFT, by the way it is run; a way that fails is left out, and said."""
    contender = Contender("PEFT", lambda call: call(), options.peft_tokens)
    speed = {}
    for way, settings in ways.items():
        try:
            if options.device != "cpu" or way == "compiled":
                tokens_per_second(adapted, ids, contender, settings)  # warms up
            speed[way] = tokens_per_second(adapted, ids, contender, settings)
        except Exception as error:  # anything, from the compiler that meets PEFT's wrappers
            print(f"PEFT, {way}: {type(error).__name__} {' '.join(str(error).split())[:100]}")
    return speed


def warm_up(
    model: Any, ids: Tensor, made: list[Contender], settings: dict[str, Any], end: float, seconds: dict[str, float]
) -> list[Contender]:
    """Compile and record each that is likely to be ready by `end`: those that are, and the seconds that each took."""
    ready = []
    for contender in made:
        start = time.perf_counter()
        # "none" has the code of "8 adapters"; any other may take what the slowest did, and a half more.
        if contender.name != "none" and start + 1.5 * max(seconds.values(), default=10) > end:
            break
        for _ in range(2):
            tokens_per_second(model, ids, contender, settings)
        ready.append(contender)
        seconds[f"{contender.name}, batch {ids.shape[0]}"] = time.perf_counter() - start
    return ready


def compiled_block(
    model: Any, enabled: EnabledModel, prompts: dict[int, Tensor], options: argparse.Namespace, end: float, peft: list[float]
) -> float:
    """The second block; returns the speed of 8 adapters at batch 1, 0 where that was not timed."""
    settings, seconds, ours = static(options, True), dict[str, float](), 0.0
    for batch, ids in prompts.items():
        torch.compiler.reset()  # each batch size with code of its own, none with symbols for it
        # The eager experts loop over those chosen, which waits for the device: no graph can hold that.
        made = [c for c in contenders(model, enabled, batch, options) if c.name != "eager"]
        ready = warm_up(model, ids, made, settings, end, seconds)
        speed = rounds(model, ids, ready, settings, options.rounds, min(end, time.perf_counter() + 8))
        if batch == 1 and ready[:1] == made[:1]:
            ours = statistics.median(speed["8 adapters"])
        print(row(batch, speed | ({"PEFT": peft} if peft and batch == 1 else {})), flush=True)
    print("seconds to compile and record: " + "; ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    return ours


def rounds(
    model: Any, ids: Tensor, made: list[Contender], settings: dict[str, Any], most: int, end: float
) -> dict[str, list[float]]:
    """Tokens per second of each in interleaved rounds; none but the first begins after `end`."""
    speed: dict[str, list[float]] = {contender.name: [] for contender in made}
    for i in range(most):
        if i > 0 and time.perf_counter() > end:
            break
        for contender in made:
            speed[contender.name].append(tokens_per_second(model, ids, contender, settings))
    return speed


def row(batch: int, speed: dict[str, list[float]]) -> str:
    median = {name: statistics.median(values) for name, values in speed.items() if values}
    median["best own"] = max((median[name] for name in OWN if name in median), default=0)

    def ratio(name: str, over: str, places: int, bar: str = "") -> str:
        is_known = name in median and median.get(over, 0) > 0
        return f"{median[name] / median[over]:.{places}f}{bar}" if is_known else "–"

    cells = [str(batch), str(max(map(len, speed.values()), default=0))]
    cells += [f"{median[name]:.2f}" if name in median else "–" for name in ("8 adapters", "none", *OWN)]
    cells += [f"{median['PEFT']:.3f}" if "PEFT" in median else "–"]
    cells += [
        ratio("8 adapters", "none", 2, " (≥ 0.9)"),
        ratio("none", "best own", 2),
        ratio("8 adapters", "best own", 2, " (≥ 1.0)"),
    ]
    cells += [ratio("8 adapters", "PEFT", 1, " (≥ 10)")]
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
    parser.add_argument("--seconds", type=float, default=16, help="for all rounds of the first block (default %(default)s)")
    parser.add_argument("--attention", action="store_true", help="adapters on attention too")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="the second block (default: on a GPU)")
    parser.add_argument("--limit", type=float, default=110, help="seconds from the start for the second block to end")
    parser.add_argument("--peft-seconds", type=float, default=10, help="for PEFT compiled, 0: none (default %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    options = parser.parse_args(arguments)
    on_gpu = options.device != "cpu"
    options.tokens = options.tokens or (64 if on_gpu else 16)
    options.peft_tokens = (options.tokens if on_gpu else 2) if options.peft_tokens is None else options.peft_tokens
    options.compiled = on_gpu if options.compiled is None else options.compiled
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    model = random_model(options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.shapes}, {options.layers} layers, bf16, {device}, load {os.getloadavg()[0]:.1f}; ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    print(f"{NUM_ADAPTERS} adapters r={RANK} on {'experts and attention' if options.attention else 'experts'}; ", end="")
    print(f"{options.prompt} + {options.tokens} tokens")

    def prompts(batch: int) -> Tensor:
        return torch.randint(0, 500, (batch, options.prompt), generator=torch.Generator().manual_seed(batch)).to(options.device)

    peft_speed: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        own_experts = [layer.mlp.experts for layer in model.model.layers]
        adapted = peft_model(model, options.attention)
        adapted.save_pretrained(folder)
        expected = logits(adapted, prompts(1)) if options.peft_tokens else None
        if options.peft_tokens and 1 in options.batches:
            ways = {"dynamic": {}, "static": static(options, False)} if options.compiled else {"dynamic": {}}
            peft_speed = time_peft(adapted, prompts(1), options, ways)
            print("PEFT: " + ", ".join(f"{way} {value:.3f}" for way, value in peft_speed.items()) + " tokens/s")
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

    print("\ndynamic cache, tokens/s, medians\n" + HEAD)
    start = time.perf_counter()
    for place, batch in enumerate(options.batches, 1):
        end = start + options.seconds * place / len(options.batches)
        made = contenders(model, enabled, batch, options)
        base = made[1].run(lambda: logits(model, prompts(batch)))
        for contender in made[1:]:
            check(contender.name, contender.run(lambda: logits(model, prompts(batch))), base)
        for contender in made:
            tokens_per_second(model, prompts(batch), contender, {})  # warms up
        speed = rounds(model, prompts(batch), made, {}, options.rounds, end)
        peft_here = {"PEFT": [peft_speed["dynamic"]]} if batch == 1 and "dynamic" in peft_speed else {}
        print(row(batch, speed | peft_here), flush=True)
    if not options.compiled:
        return
    print("\nstatic cache, compiled decode step (PEFT's not), tokens/s, medians\n" + HEAD, flush=True)
    try:
        with at_most(started + options.limit - time.perf_counter()):
            end = started + options.limit - (options.peft_seconds if peft_speed else 0)
            best = [max(peft_speed.values())] if peft_speed else []
            ours = compiled_block(model, enabled, {batch: prompts(batch) for batch in options.batches}, options, end, best)
            if peft_speed and options.peft_seconds > 0:  # last: the compiler may leave anything behind where it is interrupted
                enabled.close()
                torch.compiler.reset()
                adapted = peft_model(model, options.attention)
                value = time_peft(adapted, prompts(1), options, {"compiled": static(options, True)}).get("compiled")
                if value and ours:
                    print(f"PEFT, compiled: {value:.3f} tokens/s; 8 adapters at batch 1 / that: {ours / value:.1f}")
    except TimeoutError:
        print(f"stopped at --limit = {options.limit:.0f} s")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
