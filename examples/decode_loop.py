"""Decode with other adapters in every row of the batch: tokens per second eagerly, compiled, and as a CUDA graph.

    python examples/decode_loop.py                              # tiny on a CPU; 4 layers of Qwen3-30B-A3B's sizes on a GPU
    python examples/decode_loop.py --layers 8 --hidden 4096     # other sizes: see --help

Three rows per batch: LoRA switched off in Python, no adapter mapped (every slot -1), and an adapter for each sequence.
One graph is compiled for all batch sizes with LoRA and one without; a CUDA graph is captured per row and batch.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from moelora_ops import FusedMoEWithLoRA, LoraPool
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.compiles import unbacked
from moelora_ops.testing.decoder import Decoder, DecoderSizes

TINY = dict(layers=2, hidden=256, intermediate=128, experts=16, top_k=2, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
QWEN3_30B = dict(
    layers=4, hidden=2048, intermediate=768, experts=128, top_k=8, heads=32, kv_heads=4, head_dim=128, vocabulary=8192
)  # fmt: skip
ROWS = ("LoRA off", "no adapter mapped", "an adapter each")


class Loop:
    """A batch of sequences at fixed addresses: compiled code and graphs read and advance these tensors."""

    def __init__(self, model: Decoder, batch: int) -> None:
        self.model, self.device = model, model.sizes.device
        self.tokens, self.rows, self.positions = (torch.zeros(batch, dtype=torch.int64, device=self.device) for _ in range(3))
        self.slots = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.inputs = (self.tokens, self.rows, self.positions, self.slots)
        unbacked(*self.inputs)  # one compile for all batch sizes, one sequence included

    def restart(self) -> None:
        self.rows.copy_(torch.arange(len(self.rows)))
        self.tokens.copy_(self.rows + 1)
        self.positions.zero_()

    def run(self, step: Callable[[], None], num_steps: int) -> tuple[float, Tensor]:
        """Tokens per second, the best of three runs, and the last tokens."""
        best = float("inf")
        for _ in range(3):
            self.restart()
            self.synchronize()
            began = time.perf_counter()
            for _ in range(num_steps):
                step()
            self.synchronize()
            best = min(best, time.perf_counter() - began)
        return len(self.tokens) * num_steps / best, self.tokens.clone()

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as a CUDA graph, after a run on another stream: what is made at first use must be there before."""
        self.restart()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def advance(model: Decoder, tokens: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
    """A greedy step, in place."""
    logits, _ = model(tokens, rows, positions, slots)
    tokens.copy_(logits.argmax(-1))
    positions.add_(1)


def main(argv: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (QWEN3_30B if device == "cuda" else TINY).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32] if device == "cuda" else [1, 8])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64 if device == "cuda" else 32)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; a tiny model waits for more of them")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args(argv)
    sizes = DecoderSizes(
        num_layers=args.layers, hidden_size=args.hidden, intermediate_size=args.intermediate, num_experts=args.experts,
        top_k=args.top_k, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim, vocabulary=args.vocabulary,
        num_rows=max(args.batch), max_length=args.steps + 1, max_loras=args.adapters, max_rank=args.rank,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device,
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        run(sizes, args)


def run(sizes: DecoderSizes, args: argparse.Namespace) -> None:
    pool = sizes.pool()
    for slot in range(sizes.max_loras):  # all sorts of ranks in one pool
        load(sizes, pool, slot, rank=max(1, sizes.max_rank >> slot % 3), seed=slot)
    model = Decoder(sizes, pool, FusedMoEWithLoRA)
    model.layers[0].experts.warmup(max(args.batch), top_k=sizes.top_k)  # every kernel of ours, for all layers and batches
    compiled, graphs_before = torch.compile(advance, fullgraph=True, backend=args.backend), counters["stats"]["unique_graphs"]
    print(f"{sizes.device}, torch {torch.__version__}, {args.steps} steps of {sizes.num_layers} layers; tokens per second\n")
    if sizes.device == "cpu":
        print("no CUDA graphs: this machine has no GPU\n")
    print("| batch | adapters | eager | compiled | CUDA graph |\n|---|---|---|---|---|")
    for batch in args.batch:
        loop = Loop(model, batch)
        for row in ROWS:
            for layer in model.layers:
                layer.experts.lora_enabled = row != "LoRA off"
            mapped = torch.arange(batch) % sizes.max_loras if row == "an adapter each" else torch.full((batch,), -1)
            loop.slots.copy_(mapped)
            print(f"| {batch} | {row} | {' | '.join(speeds(loop, compiled, args.steps))} |", flush=True)
    before, tokens = counters["stats"]["unique_graphs"] - graphs_before, loop.tokens.clone()
    load(sizes, pool, 0, rank=1, seed=100)
    _, after = loop.run(lambda: compiled(model, *loop.inputs), args.steps)
    compiles = counters["stats"]["unique_graphs"] - graphs_before
    print(f"\ngraphs compiled for all of this: {before}; and after another adapter was loaded into slot 0: {compiles}")
    print(f"its sequences end with other tokens now: {not torch.equal(tokens[mapped == 0], after[mapped == 0])}")
    print(f"all others with the same: {torch.equal(tokens[mapped != 0], after[mapped != 0])}")


def speeds(loop: Loop, compiled: Callable[..., None], num_steps: int) -> list[str]:
    """Tokens per second eagerly, compiled and captured; a graph of the compiled step must say what that said."""
    eager, _ = loop.run(lambda: advance(loop.model, *loop.inputs), num_steps)

    def step() -> None:
        compiled(loop.model, *loop.inputs)

    step()
    fast, tokens = loop.run(step, num_steps)
    if loop.device == "cpu":
        return [f"{eager:,.0f}", f"{fast:,.0f}", "-"]
    graph, replayed = loop.run(loop.captured(step), num_steps)
    if not torch.equal(tokens, replayed):
        raise RuntimeError(f"a replayed loop must end with the tokens {tokens.tolist()}, got {replayed.tolist()}")
    return [f"{eager:,.0f}", f"{fast:,.0f}", f"{graph:,.0f}"]


def load(sizes: DecoderSizes, pool: LoraPool, slot: int, *, rank: int, seed: int) -> None:
    pool.load(random_adapter(sizes.geometry, rank, seed=seed, dtype=sizes.dtype, device=sizes.device), slot, progress=False)


if __name__ == "__main__":
    main()
