"""From a file to a slot of a pool: `python3 -m benchmarks.load [--layers 48] [--device cuda] [--together]`.

For adapters of rank 16 on all experts of Qwen3-30B-A3B (bf16, 1.3 GB), one of each kind of file: the size; the time of reading
the file alone, into one buffer of its size and through one of 8 MiB; the time of `pool.load(path)`; and the most host memory it
took beside the slot, over the size. Each is measured with the file in the page cache, and after dropping it from there. Every
measurement has a process of its own, and the best of three is printed; values are checked against the file first. Seconds are
of the clock and, in brackets, of the CPU: what a busy machine keeps a process waiting is in the former alone.

With --together a kind has one process, and the file is in the page cache: the first load, and the best of five later ones, for
which the allocator has memory that the kernel need not hand out anew, as in a server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moelora_ops import LoraPool, load_adapter

EXPERTS, HIDDEN, INNER, RANK, ALPHA = 128, 2048, 768, 16, 24
STEM = "base_model.model.model.layers.{}.mlp.experts"
KINDS = ("fused", "per-expert", "shared-outer")
SIZES = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}


def tensors(kind: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an adapter's file."""
    for stem in map(STEM.format, range(layers)):
        if kind == "fused":
            yield f"{stem}.base_layer.lora_A.weight", (EXPERTS * RANK, HIDDEN)
            yield f"{stem}.base_layer.lora_B.weight", (2 * INNER, RANK * EXPERTS)
            yield f"{stem}.lora_A.weight", (EXPERTS * RANK, INNER)
            yield f"{stem}.lora_B.weight", (HIDDEN, RANK * EXPERTS)
            continue
        for name, (size_in, size_out) in SIZES.items():
            if kind == "shared-outer":
                yield f"{stem}.{name}_proj.lora_A.weight", (EXPERTS if name == "down" else 1, RANK, size_in)
                yield f"{stem}.{name}_proj.lora_B.weight", (1 if name == "down" else EXPERTS, size_out, RANK)
                continue
            for expert in range(EXPERTS):
                yield f"{stem}.{expert}.{name}_proj.lora_A.weight", (RANK, size_in)
                yield f"{stem}.{expert}.{name}_proj.lora_B.weight", (size_out, RANK)


def write(folder: Path, kind: str, layers: int) -> None:
    """An adapter and the config of its base."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * HIDDEN * RANK * EXPERTS, generator=generator).bfloat16()

    def some(shape: tuple[int, ...], seed: int) -> Tensor:
        count = torch.Size(shape).numel()
        return values[seed % 9973 :][:count].view(shape).clone()

    save_file(
        {name: some(shape, i * 31) for i, (name, shape) in enumerate(tensors(kind, layers))},
        folder / "adapter_model.safetensors",
    )
    target: dict[str, Any] = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    if kind == "fused":
        target = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "peft_version": "0.21.2"}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA} | target
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": EXPERTS}
    base |= {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps(base))


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget the file's pages (the host of a virtual machine may still have them)."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(path: Path, chunk: int) -> None:
    """All bytes of the file through one buffer; `chunk` 0: into one of its size."""
    view = memoryview(bytearray(chunk)) if chunk else None
    with path.open("rb", buffering=0) as file:
        if view is None:
            file.read()
        else:
            while file.readinto(view):
                pass


def action(what: str, folder: Path, kind: str, device: str) -> Callable[[], None]:
    """What is measured, with everything that comes before it done."""
    path = folder / "adapter_model.safetensors"
    if what.startswith("read"):
        return lambda: read(path, 8 << 20 if "8 MiB" in what else 0)
    if what == "load_adapter":
        return lambda: print(end="" if load_adapter(folder, folder / "config.json").rank == RANK else "wrong")
    pool = LoraPool.from_config(
        folder / "config.json", max_loras=1, max_rank=RANK, device=device, shared_outer=kind == "shared-outer"
    )
    for layer in map(pool.layer, pool.layer_ids):  # what the kernel gives on first use belongs to the pool, not to a load
        for tensor in (layer.lora_a13, layer.lora_b13, layer.lora_a2, layer.lora_b2):
            tensor.fill_(1)
    return lambda: pool.load(folder, 0)


def measure(run: Callable[[], None], device: str) -> dict[str, float]:
    """Seconds, and bytes of host memory beside the slot."""
    if device != "cpu":
        torch.cuda.synchronize()
    before = peak()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu": time.process_time() - cpu, "bytes": peak() - before}


def peak() -> int:
    """The most resident memory so far, in bytes (ru_maxrss would begin with that of the parent process)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def check(folder: Path, kind: str, device: str) -> None:
    """The slot's first and last layer, one expert, against the adapter that was read."""
    shared = kind == "shared-outer"
    pool = LoraPool.from_config(folder / "config.json", max_loras=1, max_rank=RANK, device=device, shared_outer=shared)
    pool.load(folder, 0)
    adapter = load_adapter(folder, folder / "config.json")
    for layer_id in (pool.layer_ids[0], pool.layer_ids[-1]):
        layer, expert = pool.layer(layer_id), EXPERTS - 3
        down = adapter.layers[layer_id]["down"]
        a, b = (f[min(expert, len(f) - 1)].double() for f in (down.a, down.b))
        got = layer.lora_b2[0, 0 if shared else expert].double().cpu() @ layer.lora_a2[0, expert].double().cpu()
        torch.testing.assert_close(got, ALPHA / RANK * b @ a, rtol=0.02, atol=0.02 * float((b @ a).square().mean().sqrt()))


def apart(what: str, folder: Path, kind: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load", "--one", what, str(folder), kind, "--device", device]
    command += ["--threads", str(torch.get_num_threads())]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def together(folder: Path, kind: str, device: str, repeats: int = 5) -> dict[str, Any]:
    """In this process: the first load, then the best of later ones and of reading."""
    load, whole = (action(what, folder, kind, device) for what in ("pool.load", "read whole"))
    first = measure(load, device)
    later, read_whole = ([measure(run, device) for _ in range(repeats)] for run in (load, whole))
    times = {"read": read_whole, "first": [first], "later": later}
    best = {what: [min(g[clock] for g in got) for clock in ("seconds", "cpu")] for what, got in times.items()}
    return best | {"bytes": first["bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where to put the files; default: a temporary one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--together", action="store_true", help="in one process: first load and later ones")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        what, folder, kind = args.one
        if what == "together":
            print(json.dumps(together(Path(folder), kind, args.device)))
            return
        print(json.dumps(measure(action(what, Path(folder), kind, args.device), args.device)))
        return
    parts = ("read whole", "read by 8 MiB", "load_adapter", "pool.load")
    print(
        f"{torch.get_num_threads()} threads, pool on {args.device}, torch {torch.__version__}; seconds, best of {args.repeats}"
    )
    if args.together:
        print("\n| file | GB | read whole | pool.load, first | later | first / read | later / read | host memory / size |")
        print("|---" * 8 + "|")
    else:
        print(f"\n| file | GB | cache | {' | '.join(parts)} | over read whole | over read by 8 MiB | host memory / size |")
        print("|---|---|---|" + "---|" * (len(parts) + 3))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for kind in args.kinds.split(","):
            folder = Path(name) / kind
            folder.mkdir()
            write(folder, kind, args.layers)
            path = folder / "adapter_model.safetensors"
            if args.together:
                got = apart("together", folder, kind, args.device)
                size, times = path.stat().st_size, [got[what] for what in ("read", "first", "later")]
                ratios = [[ours / read for ours, read in zip(mine, times[0])] for mine in times[1:]]
                cells = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in [*times, *ratios]]
                print(f"| {kind} | {size / 1e9:.2f} | {' | '.join(cells)} | {got['bytes'] / size:.2f} |", flush=True)
            check(folder, kind, args.device)
            for cache in () if args.together else ("warm", "cold"):
                best, memory = {}, 0.0
                for what in parts:
                    for _ in range(args.repeats):
                        read(path, 8 << 20)
                        if cache == "cold":
                            drop_cache(path)
                        got = apart(what, folder, kind, args.device)
                        best[what] = min((got["seconds"], got["cpu"]), best.get(what, (float("inf"), 0.0)))
                        memory = max(memory, got["bytes"]) if what == "pool.load" else memory
                size = path.stat().st_size
                ratios = [[ours / read for ours, read in zip(best["pool.load"], best[what])] for what in parts[:2]]
                cells = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in [*best.values(), *ratios]]
                print(f"| {kind} | {size / 1e9:.2f} | {cache} | {' | '.join(cells)} | {memory / size:.2f} |", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
