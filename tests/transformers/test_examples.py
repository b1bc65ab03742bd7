"""The scripts of examples/ that need transformers run, each in a process of its own, and agree with PEFT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
def test_mixed_adapters(tiny: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Five rows, three adapters and the base: the tokens of PEFT's merged models."""
    tiny.main(["--model", name])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("as PEFT merged: True") for line in lines) == 4
    assert sum(line.endswith("as the base: True") for line in lines) == 1


def test_real_checkpoint(family: Any, tmp_path: Path) -> None:
    """A saved model with two adapters: the base row is the base's, and three speeds are printed."""
    family.model.save_pretrained(tmp_path)
    adapters = [f"--adapter={name}={family.folder / name}" for name in ("a", "b")]
    out = run("examples/real_checkpoint.py", tmp_path, *adapters, "--dtype", "float32", "--tokens", 6, "--device", "cpu")
    assert "a: rank 2, experts of 2 layers, 8 linear layers" in out and "b: rank 5" in out
    assert "base row as without adapters: True" in out
    rows = [line for line in out.splitlines() if line.startswith("[")]
    assert len(rows) == 3 and len(set(rows)) == 3, "each adapter has its own text"
    assert out.splitlines()[-1].startswith("tokens/s: ")


def test_benchmark() -> None:
    """benchmarks/generate.py checks the contenders' values and prints a row for the batch, in each of its two blocks."""
    out = run(
        *("-m", "benchmarks.generate", "--shapes=tiny", "--layers=1", "--rounds=1", "--tokens=3", "--batches=1"),
        *("--device=cpu", "--compiled", "--peft-seconds=0"),
    )
    rows = [line for line in out.splitlines() if line.startswith("| 1 |")]
    assert len(rows) == 2 and all(row.count("≥") == 3 for row in rows), "each bar stands beside its value"
    assert rows[1].count("–") == 1, "all but the eager experts can be compiled"
