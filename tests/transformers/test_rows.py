"""`integrations.transformers.enable`: each row of a mixed batch is what PEFT's merged model makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers >= 5.17: pip install moelora_ops[test]")
pytest.importorskip("peft", reason="needs peft to write adapters and to merge them: pip install moelora_ops[test]")

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "nemotron_h")
RANKS = {"a": 2, "b": 5, "c": 8}
ROWS: list[str | None] = ["b", None, "a", "c", None, "b"]
every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


def one_row(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """A row of left-padded inputs, alone and without its padding."""
    keep = inputs["attention_mask"][row].bool()
    return {name: value[row, keep][None] for name, value in inputs.items()}


def check_rows(family: Any, logits: Tensor, base: Tensor, inputs: dict[str, Tensor], rows: list[str | None]) -> None:
    """The last logits of each row against PEFT's merged model, relative to what the adapter changes."""
    for row, name in enumerate(rows):
        if name is None:
            assert torch.equal(logits[row], base[row]), f"row {row}: base rows have the bits of the model without adapters"
            continue
        expected = family.merged[name](**one_row(inputs, row)).logits[0, -1].double()
        effect = (expected - base[row, -1].double()).norm()
        assert effect > 0.2 * expected.norm(), "the adapter must matter"
        assert (logits[row, -1].double() - expected).norm() < 1e-4 * effect, f"row {row}: {name}"


@every_family
def test_rows_are_what_peft_makes_of_them(family: Any) -> None:
    """Experts, attention, ranks, scalings and padding: every row has its own adapter and nothing of its neighbours'."""
    enabled = family.enable()
    inputs = family.left_padded(len(ROWS))
    base = family.model(**inputs).logits
    for name in RANKS:
        report = enabled.load(family.folder / name, name)
        assert report.rank == RANKS[name] and report.linears and not report.not_applied
    with enabled.adapters(ROWS):
        check_rows(family, family.model(**inputs).logits, base, inputs, ROWS)
    assert torch.equal(family.model(**inputs).logits, base), "outside the block the model is the base model"
    with enabled.adapters("c"):
        check_rows(family, family.model(**inputs).logits, base, inputs, ["c"] * len(ROWS))


@every_family
def test_base_is_transformers_own(family: Any) -> None:
    """Without adapters the enabled model computes what transformers computes, and closing it gives the very model back."""
    inputs = {"input_ids": family.prompts(3)}
    own = family.model(**inputs).logits
    enabled = family.enable(max_loras=1, max_rank=4)
    assert (family.model(**inputs).logits - own).norm() < 1e-5 * own.norm()
    enabled.close()
    assert torch.equal(family.model(**inputs).logits, own)


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "chunked prefill": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE.keys())
def test_generate(family: Any, options: dict[str, Any]) -> None:
    """Beams, samples and cached steps keep the adapter of their prompt, with left padding too."""
    inputs, rows = family.left_padded(4), ROWS[:4]
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, **options}
    enabled = family.enable("a", "b", "c")
    with enabled.adapters(rows):
        out = family.model.generate(**inputs, **settings)
    per_row = settings.get("num_return_sequences", 1)
    enabled.close()
    for row, name in enumerate(rows):
        alone = family.merged[name].generate(**one_row(inputs, row), **settings)[:, -6:]
        assert torch.equal(out[row * per_row : (row + 1) * per_row, -6:], alone), f"row {row}: {name}"


def test_assisted_generation(family: Any) -> None:
    """Speculation by prompt look-up, which transformers does for one sequence at a time."""
    enabled = family.enable("b")
    with enabled.adapters(["b"]):
        out = family.model.generate(family.prompts(1, 12), max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(out, family.merged["b"].generate(family.prompts(1, 12), max_new_tokens=6, do_sample=False))


def test_right_padding(family: Any) -> None:
    """A forward with padding behind the tokens: the last real token's logits."""
    ids, lengths = family.prompts(3), [7, 4, 5]
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    enabled = family.enable("a", "b", "c")
    with enabled.adapters(["a", "b", "c"]):
        logits = family.model(input_ids=ids, attention_mask=mask.long()).logits
    for row, name in enumerate("abc"):
        expected = family.merged[name](input_ids=ids[row : row + 1, : lengths[row]]).logits[0, -1]
        assert (logits[row, lengths[row] - 1] - expected).norm() < 1e-4 * expected.norm()


def test_wrong_length(family: Any) -> None:
    """A list of another length than the batch is an error; only generate, which multiplies rows by beams, takes a multiple."""
    enabled = family.enable("a", "b")
    for batch, names in ((3, ["a", "b"]), (4, ["a", "b"]), (2, ["a", "b", None]), (2, ["a"])):
        with enabled.adapters(names), pytest.raises(ValueError, match=f"each of the {batch} sequences.*got {len(names)}"):
            family.model(family.prompts(batch))
    with enabled.adapters(["a", "b", None]), pytest.raises(ValueError, match="each of the 4 sequences"):
        family.model.generate(family.prompts(4), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"loaded adapters \(a, b\), got 'nobody'"), enabled.adapters(["a", "nobody"]):
        pass
    for empty in ([], [None] * 2000):
        with pytest.raises(ValueError, match="1 to max_sequences = 1024 sequences"), enabled.adapters(empty):
            pass


def test_blocks_nest(family: Any) -> None:
    """An inner block ends with the outer one's adapters, an exception too."""
    enabled = family.enable("a", "b")
    ids = family.prompts(2)
    with enabled.adapters(["a", "b"]):
        outer = family.model(ids).logits
        with pytest.raises(RuntimeError, match="inside"), enabled.adapters("b"):
            raise RuntimeError("inside")
        assert torch.equal(family.model(ids).logits, outer)


def test_forward_with_gradients_on(family: Any) -> None:
    """Without no_grad the forward gives the same values, and its backward raises instead of leaving gradients out."""
    enabled, ids = family.enable("a"), family.prompts(1)
    with enabled.adapters("a"):
        expected = family.model(ids).logits
        with torch.enable_grad():
            logits = family.model(ids).logits
            assert torch.equal(logits, expected)
            with pytest.raises(NotImplementedError, match="serves inference only"):
                logits.sum().backward()
