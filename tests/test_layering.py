"""The house rules that a machine can check: who imports whom, file lengths, the package list."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import modules of its own level and below.
LEVELS = (
    ("errors", "checks", "routing"),
    ("reference", "meta", "kernels", "configs"),
    ("ops",),
    ("adapters", "layers"),
    ("integrations", "compile", "cli", "testing", "bench", "tuning"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

# Third-party packages and the only places that may import them; torch may be imported everywhere.
THIRD_PARTY = {
    "triton": ("kernels/triton/",),
    "safetensors": ("adapters/", "integrations/", "cli/", "testing/"),
    "transformers": ("integrations/", "adapters/"),
    "peft": ("integrations/", "adapters/"),
    "numpy": ("testing/",),
    "matplotlib": ("bench/plot.py",),
    "vllm": ("bench/peers.py",),
    "sglang": ("bench/peers.py",),
    "hypothesis": ("testing/",),
}


def sources() -> dict[str, Path]:
    """Every module of the package by its path inside it; meta/ is installed as moelora_ops/meta."""
    files = {path.relative_to(ROOT / "moelora_ops").as_posix(): path for path in (ROOT / "moelora_ops").rglob("*.py")}
    files |= {f"meta/{path.relative_to(ROOT / 'meta').as_posix()}": path for path in (ROOT / "meta").rglob("*.py")}
    return files


def imports(name: str, source: str) -> Iterator[str]:
    """Absolute names of what a module imports, wherever in it the import stands."""
    package = ["moelora_ops", *Path(name).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def broken_rules(name: str, source: str) -> list[str]:
    """What a module imports against the rules above."""
    broken = []
    own = Path(name).parts[0].removesuffix(".py")
    for imported in imports(name, source):
        top, _, rest = imported.partition(".")
        if top != "moelora_ops":
            allowed = top in sys.stdlib_module_names or top == "torch" or name.startswith(THIRD_PARTY.get(top, ()))
            if not allowed:
                broken.append(f"{name} imports {imported}")
        elif own != "__init__":
            target = rest.partition(".")[0]
            if target in LEVEL and LEVEL[target] > LEVEL[own]:
                broken.append(f"{name} imports {imported}, a level up")
            if own == "meta" and target not in ("meta", *LEVELS[0]):
                broken.append(f"{name} imports {imported}: meta knows sizes only")
            if target not in LEVEL and target != "__version__" and own != "cli":
                broken.append(f"{name} imports {imported}: take it from its module")
    return broken


def test_imports_point_downwards() -> None:
    """No module imports from a level above its own, and third-party packages stay in their rooms."""
    assert [line for name, path in sources().items() for line in broken_rules(name, path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("checks.py", "from .ops import fused_moe_lora"),
        ("meta/fused_moe_lora.py", "from ..kernels import native"),
        ("meta/fused_moe_lora.py", "def check():\n    import triton"),
        ("ops/align.py", "from .. import layers"),
        ("ops/align.py", "import moelora_ops.cli.demo"),
        ("ops/align.py", "from ..bench import floors"),
        ("bench/report.py", "import matplotlib"),
        ("kernels/native.py", "import triton"),
        ("layers.py", "import transformers"),
        ("adapters/pool.py", "from moelora_ops import fused_moe_lora"),
    ],
)
def test_the_rules_bite(name: str, source: str) -> None:
    """Each kind of forbidden import is found."""
    assert broken_rules(name, source)


def test_every_module_has_a_level() -> None:
    """A new room gets its place in the order before it gets files."""
    tops = {Path(name).parts[0].removesuffix(".py") for name in sources()}
    assert tops - {"__init__"} <= LEVEL.keys()


def test_only_native_loads_the_extension() -> None:
    """The compiled libraries enter in one place."""
    users = [name for name, path in sources().items() if "load_library" in path.read_text()]
    assert users == ["kernels/native.py"]


def test_imports_without_triton() -> None:
    """Importing the package, and running an op on CPU tensors, needs no Triton."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch, moelora_ops, moelora_ops.cli; ids = torch.zeros(1, 1).int(); "
        "print(moelora_ops.moe_lora_align_block_size(ids, ids[0], 1, 1, 1))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_files_are_short() -> None:
    """A file over 400 lines is two rooms in one."""
    files = [*sources().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    files += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_package_is_installed() -> None:
    """Each folder with an __init__.py is in the package list of pyproject.toml."""
    listed = (ROOT / "pyproject.toml").read_text()
    packages = {".".join(("moelora_ops", *Path(name).parts[:-1])) for name in sources() if name.endswith("__init__.py")}
    assert [package for package in sorted(packages) if f'"{package}"' not in listed] == []
