"""Every kernel under compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
SCRIPT = Path(__file__).with_name("sanitized.py")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_errors(tool: str) -> None:
    """Without the caching allocator every tensor is an allocation of its own, so an access past its end is an error."""
    assert SANITIZER is not None
    # Calls of the driver may fail: a kernel's parameters are counted by asking for one more. What fails here is accesses.
    command = [
        SANITIZER,
        "--tool",
        tool,
        *(("--report-api-errors", "no") if tool == "memcheck" else ()),
        "--error-exitcode",
        "9",
    ]
    command += ["--target-processes", "all", sys.executable, str(SCRIPT)]
    done = subprocess.run(
        command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, timeout=480
    )
    assert done.returncode == 0 and "every kernel ran" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
