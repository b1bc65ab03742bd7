"""Generate with adapters of yours on a checkpoint of yours: one sequence for each adapter and one for the base, in one batch.

    python examples/real_checkpoint.py CHECKPOINT --adapter math=PATH --adapter code=PATH --prompt "Prove that"

Prints the texts, and tokens per second of the mixed batch, of the batch without adapters, and of transformers' own experts.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moelora_ops.integrations.transformers import enable


def tokens_per_second(model, inputs, num_tokens):
    """Of the second of two runs: the first compiles kernels."""
    for _ in range(2):
        start = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        out.cpu()  # waits for the device
    return out, out.shape[0] * num_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder or hub name of a MoE model")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="may be given several times")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each sequence (default %(default)s)")
    parser.add_argument("--max-rank", type=int, default=64, help="of any adapter (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype)).to(options.device)
    adapters = dict(given.split("=", 1) for given in options.adapter)
    rows = [None, *adapters]
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    inputs = tokenizer([options.prompt] * len(rows), return_tensors="pt").to(options.device)
    if inputs["input_ids"].shape[1] == 0:  # a checkpoint without a tokenizer: any tokens will do for the clock
        inputs = {"input_ids": torch.randint(1, 50, (1, 8), device=options.device).repeat(len(rows), 1)}

    _, own = tokens_per_second(model, inputs, options.tokens)
    enabled = enable(model, max_loras=max(1, len(adapters)), max_rank=options.max_rank)
    for name, path in adapters.items():
        report = enabled.load(path, name)
        print(f"{name}: rank {report.rank}, experts of {len(report.expert_layers)} layers, {len(report.linears)} linear layers")
    with enabled.adapters(rows):
        mixed, with_adapters = tokens_per_second(model, inputs, options.tokens)
    base, without = tokens_per_second(model, inputs, options.tokens)

    for name, row in zip(rows, mixed):
        print(f"--- {name or 'base'}\n{tokenizer.decode(row, skip_special_tokens=True) or row.tolist()}")
    print(f"--- {len(rows)} sequences, {options.tokens} tokens each")
    print(f"base row as without adapters: {torch.equal(mixed[0], base[0])}")
    print(f"tokens/s: {with_adapters:.1f} mixed, {without:.1f} without adapters, {own:.1f} transformers' own experts")


if __name__ == "__main__":
    main()
