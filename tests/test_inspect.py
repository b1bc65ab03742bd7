"""`moelora inspect`: what it says of each fixture is what `load_adapter` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moelora_ops import AdapterError, load_adapter
from moelora_ops.cli import main
from moelora_ops.testing.adapter_files import BASE, PREFIX, per_expert, write

FIXTURES = Path(__file__).parent / "data" / "adapters"
NAMES = sorted(p.name for p in FIXTURES.iterdir())


def inspect(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    code = main(["inspect", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def table(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["inspect", *map(str, argv)])
    return code, capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*has no tensors for routed experts")
@pytest.mark.parametrize("name", NAMES)
def test_says_what_load_adapter_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same verdict, error, layers, ranks, scalings and unused tensors; exit code 1 for a refusal; both outputs."""
    meta = json.loads((FIXTURES / name / "meta.json").read_text())
    base = FIXTURES / name / "base_config.json"
    needed, limit = meta.get("options_needed") or {}, meta.get("pool_max_rank")
    argv = [FIXTURES / name, "--base", base]
    argv += ["--max-rank", limit] if limit else []
    argv += [part for option, value in needed.items() for part in (f"--{option.replace('_', '-')}", value)]
    code, found = inspect(capsys, *argv)
    text_code, text = table(capsys, *argv)
    assert code == text_code == (0 if meta["expect"] == "load" else 1)
    try:
        adapter = load_adapter(FIXTURES / name, base, max_rank=limit, **needed)
    except AdapterError as error:
        assert found["loads"] is False and found["error"] == str(error) and text.endswith(f"REFUSED: {error}\n")
        return
    assert found["loads"] and found["error"] is None and text.endswith("\nloads\n")
    assert found["unused"] == adapter.unused and all(name in text for name in adapter.unused)
    loras = {(row["layer"], row["projection"]): row for row in found["layers"]}
    assert loras.keys() == {(layer, p) for layer, projections in adapter.layers.items() for p in projections}
    for (layer, projection), row in loras.items():
        lora = adapter.layers[layer][projection]
        assert row["ranks"][-1] == lora.rank and set(row["scalings"]) == set(lora.scaling.tolist()) - {0.0}
        assert (row["a"] == "shared") == (len(lora.a) == 1) and (row["b"] == "shared") == (len(lora.b) == 1)
    assert found["proof"] in text and found["format"] in text


@pytest.mark.parametrize("name", NAMES)
def test_without_a_base_it_says_what_it_can(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What loads is not refused; what no base could save is, with the reason that a load gives; the rest stays open."""
    meta = json.loads((FIXTURES / name / "meta.json").read_text())
    code, found = inspect(capsys, FIXTURES / name)
    needs_base = ("shape", "rank", "layer_out", "_nover", "bias_param", "missing_half", "transposed")
    if meta["expect"] == "load" or any(word in name for word in needs_base):
        assert code == 0 and found["loads"] is None and found["tensors"] and found["format"]
        return
    with pytest.raises(AdapterError) as error:
        load_adapter(FIXTURES / name, FIXTURES / name / "base_config.json")
    assert code == 1 and found["error"] == str(error.value)


def test_equal_layers_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks and scalings that differ between experts show their range; an untrained B is pointed out."""
    config, tensors = per_expert()
    for name in [n for n in tensors if ".1.mlp.experts.2.down_proj" in n]:
        tensors[name] = tensors[name][:1] if "lora_A" in name else tensors[name][:, :1].contiguous()
    for name in [n for n in tensors if "up_proj.lora_B" in n]:
        tensors[name] = torch.zeros_like(tensors[name])
    config |= {"rank_pattern": {r"layers\.1\.mlp\.experts\.2\.down_proj": 1}, "alpha_pattern": {r"experts\.1\.gate_proj": 3}}
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    code, text = table(capsys, write(tmp_path, config, tensors), "--base", tmp_path)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    assert "1-2 gate 4 0.75-2 4 of 4 per expert per expert float32" in rows
    assert "1-2 up 4 2 4 of 4 per expert shared, all zero float32" in rows
    assert "1 down 1-4 2-8 4 of 4 per expert per expert float32" in rows
    assert "2 down 4 2 4 of 4 per expert per expert float32" in rows


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of a file's names are printed as escapes."""
    config, tensors = per_expert()
    write(tmp_path, config, tensors | {f"{PREFIX}1.mlp.gate\x1b[2Jx": torch.ones(1)})
    code, text = table(capsys, tmp_path)
    assert code == 0 and "\x1b" not in text and "mlp.gate\\x1b[2Jx" in text


def test_a_file_without_a_config_still_shows_its_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal keeps what was found before it."""
    save_file({"a.0.b": torch.ones(2, 3), "a.1.b": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    code, found = inspect(capsys, tmp_path)
    assert code == 1 and "adapter_config.json" in found["error"]
    assert found["tensors"] == [{"names": "a.*.b", "count": 2, "shapes": [[2, 3]]}]


@pytest.mark.parametrize("argv", [["nowhere"], [FIXTURES / NAMES[0], "--base", "nowhere.json"]], ids=["adapter", "base"])
def test_a_missing_path_is_a_refusal(argv: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, no traceback."""
    code, text = table(capsys, *argv)
    assert code == 1 and "REFUSED: " in text


def test_strict_and_max_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The options of load_adapter have the same effect here."""
    name = FIXTURES / "with_attn_embed_head"
    for argv in ([name, "--strict"], [name, "--strict", "--base", name / "base_config.json"]):
        assert "strict=True takes tensors of routed experts only" in inspect(capsys, *argv)[1]["error"]
    code, found = inspect(capsys, name, "--base", name / "base_config.json", "--max-rank", 2)
    assert code == 1 and "rank must be <= max_rank = 2, got 3" in found["error"]
