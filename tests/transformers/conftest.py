"""Tiny models of several families, their PEFT adapters on disk, and what PEFT makes of them."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = {"a": 2, "b": 5, "c": 8}


def example(name: str) -> Any:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Family:
    """A tiny model, adapters a, b and c on disk, and PEFT's merge of each (None: the base)."""

    name: str
    model: Any
    folder: Path
    merged: dict[str | None, Any]

    def enable(self, *names: str, **options: Any) -> Any:
        """The model with adapters loaded."""
        from moelora_ops.integrations.transformers import enable

        enabled = enable(self.model, **{"max_loras": 4, "max_rank": 16, **options})
        for name in names:
            enabled.load(self.folder / name, name)
        return enabled

    @staticmethod
    def prompts(batch: int, length: int = 7) -> Tensor:
        return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(batch))

    def left_padded(self, batch: int, length: int = 7) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        for row in range(batch):
            mask[row, : row % 3] = 0
        return {"input_ids": self.prompts(batch, length) * mask, "attention_mask": mask}


_MADE: dict[str, Family] = {}


@pytest.fixture
def tiny() -> Any:
    """examples/mixed_adapters.py."""
    return example("mixed_adapters")


@pytest.fixture
def family(request: pytest.FixtureRequest, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Made once a run; each test gets a model that no other has touched."""
    name = getattr(request, "param", "qwen3_moe")
    if name not in _MADE:
        model, folder = tiny.make_model(name), tmp_path_factory.mktemp(name)
        merged = {a: tiny.make_adapter(model, folder / a, rank, seed=rank) for a, rank in RANKS.items()}
        _MADE[name] = Family(name, model, folder, {None: model, **merged})
    made = _MADE[name]
    return Family(name, copy.deepcopy(made.model), made.folder, made.merged)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """No gradients; one thread, which is faster for models of this size, and much so on a machine that does other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
