"""The `moelora` command: what it prints, its exit codes, and that the demo's checks can fail."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

import moelora_ops
from moelora_ops import FusedMoEWithLoRA, LoraAdapter, LoraPool, meta
from moelora_ops.cli import demo, env, main
from moelora_ops.kernels import native

# No code generation: what the demo checks is the same, in seconds.
QUICK_DEMO = ["demo", "--device", "cpu", "--backend", "eager", "--steps", "4"]


def test_demo_passes_as_shipped() -> None:
    """`python -m moelora_ops.cli demo`, with nothing replaced, ends with exit code 0 and all checks ok."""
    done = subprocess.run([sys.executable, "-m", "moelora_ops.cli", "demo"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and done.stdout.count("\nok ") == 6, done.stdout


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_quick_demo_passes(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo passes in both dtypes, and again in the same process."""
    assert main([*QUICK_DEMO, "--dtype", dtype]) == 0, capsys.readouterr().out


def _lose_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    load, filled = LoraPool.load, set()

    def once(pool: LoraPool, adapter: LoraAdapter, slot: int) -> None:
        if slot not in filled:
            load(pool, adapter, slot)
        filled.add(slot)

    monkeypatch.setattr(LoraPool, "load", once)


def _load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraPool, "load", lambda pool, adapter, slot: None)


def _exchange_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    load = demo.load_adapter

    def exchanged(*args: Any) -> LoraAdapter:
        adapter = load(*args)
        layers = {i: {"gate": p["up"], "up": p["gate"], "down": p["down"]} for i, p in adapter.layers.items()}
        return dataclasses.replace(adapter, layers=layers)

    monkeypatch.setattr(demo, "load_adapter", exchanged)


def _map_no_adapter_to_slot_0(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FusedMoEWithLoRA):
        def forward(self, x: Any, weights: Any, ids: Any, mapping: Any = None) -> Any:
            return super().forward(x, weights, ids, mapping.clamp(min=0))

    monkeypatch.setattr(demo, "FusedMoEWithLoRA", Broken)


def _round_rows_without_adapter_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FusedMoEWithLoRA):
        def forward(self, x: Any, weights: Any, ids: Any, mapping: Any = None) -> Any:
            out = super().forward(x, weights, ids, mapping)
            return out if self.lora is None else out * (1 + 2**-23)

    monkeypatch.setattr(demo, "FusedMoEWithLoRA", Broken)


def _recompile_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    load, layers = LoraPool.load, []

    class Broken(FusedMoEWithLoRA):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.loads = 0  # a number of the module, so that Dynamo guards on it
            layers.append(self)

        def forward(self, x: Any, weights: Any, ids: Any, mapping: Any = None) -> Any:
            return super().forward(x, weights, ids, mapping) + 0 * self.loads

    def counted(pool: LoraPool, adapter: LoraAdapter, slot: int) -> None:
        load(pool, adapter, slot)
        for layer in layers:
            layer.loads += 1

    monkeypatch.setattr(demo, "FusedMoEWithLoRA", Broken)
    monkeypatch.setattr(LoraPool, "load", counted)


@pytest.mark.parametrize(
    ("break_it", "failing"),
    [
        (_lose_the_swap, "with an adapter"),
        (_load_nothing, "with an adapter"),
        (_exchange_gate_and_up, "with an adapter"),
        (_map_no_adapter_to_slot_0, "without one"),
        (_round_rows_without_adapter_elsewhere, "the same bits"),
        (_recompile_on_load, "recompiled"),
    ],
)
def test_demo_fails_when_broken(
    break_it: Any, failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of fault is seen by its check, and the exit code is 1."""
    break_it(monkeypatch)
    assert main(QUICK_DEMO) == 1
    out = capsys.readouterr().out
    assert any(line.startswith("FAIL") and failing in line for line in out.splitlines()), out


def test_env_names_a_backend_for_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, and a line per op."""
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for word in (moelora_ops.__version__, torch.__version__, *(op.NAME for op in meta.OPS)):
        assert word in out


def test_env_says_why_the_compiled_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason that the loader gave is printed beside the backend that serves instead."""
    monkeypatch.setattr(native, "CPU_MISSING", "failed to load: no such symbol")
    main(["env"])
    assert "PyTorch reference (compiled C++: failed to load: no such symbol)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cuda", "gpu", "kernel", "triton", "expected"),
    [
        (None, False, None, True, "nothing (this torch has no CUDA)"),
        ("13.0", False, None, True, "nothing (torch sees no GPU)"),
        ("13.0", True, object(), True, "CUDA C++"),
        ("13.0", True, None, True, "Triton (CUDA C++: the reason)"),
        ("13.0", True, None, False, "nothing (Triton: not installed; CUDA C++: the reason)"),
    ],
)
def test_cuda_backend(
    cuda: str | None, gpu: bool, kernel: object, triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves CUDA tensors, in each kind of environment."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(native, "op", lambda name, device_type: kernel)
    monkeypatch.setattr(native, "CUDA_MISSING", "the reason")
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: object() if triton else None)
    assert env.cuda_backend("moe_lora_align_block_size") == expected


@pytest.mark.parametrize("argv", [[], ["nope"], ["demo", "--steps", "1"], ["demo", "--device", "abacus"]], ids=str)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands and options never look like success."""
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    assert "usage: moelora" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version, --help every command."""
    for argv, words in ((["--version"], [moelora_ops.__version__]), (["--help"], ["demo", "env"])):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)
