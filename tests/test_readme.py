"""The Python in README and docs runs as printed, and what they say of the repository is so."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from moelora_ops.cli import COMMANDS, demo_adapters, tiny_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(page: Path) -> None:
    """Run a page's blocks in order, in one namespace; a block whose first line names a file becomes that module."""
    namespace = vars(sys.modules["__main__"])  # a namespace of no module could not be compiled: guards look names up by module
    for number, source in enumerate(blocks(page), 1):
        if "from transformers import" in source and importlib.util.find_spec("transformers") is None:
            print(f"{page.name}, block {number} and those after it need transformers")
            return
        code = compile(source, f"{page.name}, block {number}", "exec")
        named = re.match(r"# (\S+)\.py\n", source)
        if named is None:
            exec(code, namespace)
            continue
        name = named[1].replace("/", ".")
        name = f"moelora_ops.{name}" if name.startswith("meta.") else name
        module = types.ModuleType(name)
        package, _, stem = name.rpartition(".")
        module.__package__ = package
        sys.modules[name] = module
        exec(code, module.__dict__)
        if package in sys.modules:
            setattr(sys.modules[package], stem, module)
        for key, test in vars(module).items():
            if key.startswith("test_"):
                test()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_examples_run_as_printed(page: Path, tmp_path: Path) -> None:
    """Each page runs from its first block to its last in a process of its own, beside an adapter and a config.json."""
    demo_adapters.write_per_expert(tmp_path / "adapter", demo_adapters.random_factors(8, seed=0, shared_a=False))
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.CONFIG))
    code = f"import runpy, pathlib; runpy.run_path({__file__!r})['run'](pathlib.Path({str(page)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "bits: False" not in done.stdout


def test_quickstart_is_the_readme_example() -> None:
    """examples/quickstart.py is the README's first block, so it is tested with it."""
    assert (ROOT / "examples" / "quickstart.py").read_text() == blocks(ROOT / "README.md")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_commands_exist(page: Path) -> None:
    """Every relative link leads to a file, and every `make target` and `moelora command` is one."""
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"`moelora ([a-z]+)", text)) <= {command.NAME for command in COMMANDS}
