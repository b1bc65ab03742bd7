"""A MoE model with adapters as a file: torch.export, then an AOTInductor package, run from Python and from C++.

    python examples/export.py [FOLDER] [--cpp]     # --cpp also compiles export_driver.cpp and runs the package without Python

Adapters are inputs of the model: a package serves whatever lies in them, so loading another adapter needs no other package.
docs/export.md tells what works where.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from moelora_ops import fused_experts_lora, fused_moe_lora, moe_lora_align_block_size
from moelora_ops.kernels import native

K, E, L, R, H, I = 2, 4, 3, 8, 32, 16  # top_k, experts, adapter slots, rank, hidden, intermediate
Case = tuple[list[Tensor], list[Tensor]]  # inputs and outputs


class TinyMoe(nn.Module):
    """Two expert layers: one is a single op, the other has deltas around base products of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Buffer(torch.randn(E, H, generator=generator))
        self.w13 = nn.Buffer(torch.randn(E, 2 * I, H, generator=generator) / H**0.5)
        self.w2 = nn.Buffer(torch.randn(E, H, I, generator=generator) / I**0.5)

    def forward(
        self, x: Tensor, slots: Tensor, lora_a13: Tensor, lora_b13: Tensor, lora_a2: Tensor, lora_b2: Tensor, ranks: Tensor
    ) -> Tensor:
        weights, ids = (x @ self.router.t()).softmax(-1).topk(K)
        y = x + fused_experts_lora(
            x, self.w13, self.w2, weights, ids, slots, lora_a13, lora_b13, lora_a2, lora_b2, lora_ranks=ranks
        )
        weights, ids = (y @ self.router.t()).softmax(-1).topk(K)
        aligned = moe_lora_align_block_size(ids, slots, E, 8, L)
        gate_up = torch.einsum("th,tkoh->tko", y, self.w13[ids])
        for half, offset in ((0, 0), (1, I)):  # gate and up one by one, the second with an offset
            a, b = lora_a13[:, :, half * R : (half + 1) * R], lora_b13[:, :, half * I : (half + 1) * I]
            fused_moe_lora(gate_up, y, [a], [b], weights, *aligned, lora_ranks=ranks, offset=offset)
        act = nn.functional.silu(gate_up[..., :I]) * gate_up[..., I:]
        down = torch.einsum("tki,tkhi->tkh", act, self.w2[ids]) * weights[..., None]
        fused_moe_lora(
            down, act.flatten(0, 1), [lora_a2], [lora_b2], weights, *aligned, lora_ranks=ranks, mul_routed_weight=True
        )
        return y + down.sum(1)


def adapters(seed: int = 1) -> list[Tensor]:
    """What a pool of L slots holds: A and B of gate and up, A and B of down, ranks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((L, E, 2 * R, H), (L, E, 2 * I, R), (L, E, R, I), (L, E, H, R))
    factors = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    return [*factors, torch.tensor([R, 3, 5], dtype=torch.int32)]


def batch(num_tokens: int, slots: list[int], seed: int = 2) -> list[Tensor]:
    """Hidden states and the adapter slot of each token, taken in turn from `slots`."""
    x = torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(seed + num_tokens))
    return [x, torch.tensor([slots[t % len(slots)] for t in range(num_tokens)], dtype=torch.int32)]


def export(model: nn.Module, most_tokens: int = 4096, device: str = "cpu") -> torch.export.ExportedProgram:
    """The model for any batch of 1 to `most_tokens` tokens."""
    tokens = torch.export.Dim("tokens", min=1, max=most_tokens)
    inputs = [tensor.to(device) for tensor in (*batch(5, [0, -1, 2]), *adapters())]
    shapes = ({0: tokens}, {0: tokens}, *(None for _ in adapters()))
    with torch.no_grad():
        return torch.export.export(model, tuple(inputs), dynamic_shapes=shapes)


def package(program: torch.export.ExportedProgram, path: Path) -> Path:
    """One file with the compiled model and its weights."""
    return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def run_package(path: Path, device: str = "cpu") -> list[Case]:
    """Batches of several sizes and adapter mixes through the package, from Python."""
    model = torch._inductor.aoti_load_package(str(path))
    cases = []
    for num_tokens, slots, seed in ((1, [0], 1), (5, [0, -1, 2], 1), (64, [1, 7, 0, -1, 2], 1), (7, [-1], 1), (64, [2, 1], 4)):
        inputs = [tensor.to(device) for tensor in (*batch(num_tokens, slots), *adapters(seed))]
        output = model(*inputs)
        cases.append((inputs, [output] if isinstance(output, Tensor) else list(output)))
    return cases


def compile_driver(path: Path) -> Path:
    """export_driver.cpp as a program."""
    torch_root = Path(torch.__file__).parent
    include, library = torch_root / "include", torch_root / "lib"
    command = ["g++", "-std=c++20", "-O0", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    command += [str(Path(__file__).with_name("export_driver.cpp")), "-o", str(path), f"-L{library}"]
    subprocess.run([*command, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}"], check=True)
    return path


def run_driver(driver: Path, package_path: Path, cases: list[Case]) -> str:
    """What the driver prints: the package again, without Python, against the outputs of `cases`."""
    file = package_path.with_suffix(".cases")
    torch.save([[inputs, outputs] for inputs, outputs in cases], file)
    command = [str(driver), str(package_path), str(file), *map(str, native.runtime_libraries())]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where files go; a temporary folder")
    parser.add_argument("--cpp", action="store_true", help="run the package from C++ too; needs g++ and a CPU")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    model = TinyMoe()
    program = export(model)
    torch.export.save(program, folder / "tiny_moe.exported.pt2")
    loaded = torch.export.load(folder / "tiny_moe.exported.pt2").module()
    inputs = (*batch(64, [1, 0, -1, 2]), *adapters())
    print("exported, saved and loaded, the same bits:", torch.equal(loaded(*inputs), model(*inputs)))
    path = package(program, folder / "tiny_moe.pt2")
    cases = run_package(path)
    error = max(float((output[0] - model(*inputs)).abs().max()) for inputs, output in cases)
    print(f"package {path}: {len(cases)} batches, largest difference to eager {error:.1e}")
    if options.cpp:
        if shutil.which("g++") is None:
            raise SystemExit("--cpp needs g++")
        print(run_driver(compile_driver(folder / "export_driver"), path, cases), end="")


if __name__ == "__main__":
    main()
