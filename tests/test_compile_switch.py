"""The switch of the Inductor rewrites: off unless asked for, caches, passes of others, versions of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import moelora_ops.compile
from moelora_ops import UnsupportedError
from moelora_ops.testing.cases import Case
from moelora_ops.testing.compiles import REWRITTEN
from moelora_ops.testing.passes import Activated, Aligns, batch

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_off_by_default_and_after_the_block() -> None:
    """Without enable(), and after its end, graphs are as they were, also with a cache that holds the rewritten one."""
    module = Activated("chunk")
    args = batch(13)

    def compiled() -> str:
        torch._dynamo.reset()
        with torch.no_grad():
            _, codes = torch._inductor.utils.run_and_get_code(torch.compile(module, fullgraph=True), *args)
        return str(codes[0])

    with fresh_cache():
        plain = compiled()
        assert "fused_moe_lora_activation" not in plain
        with moelora_ops.compile.enable() as rewrites:
            on = compiled()
            misses = counters["inductor"]["fxgraph_cache_miss"]
            assert "fused_moe_lora_activation" in on and rewrites.fired["delta_activation"] == 1
            assert "fused_moe_lora_activation" in compiled(), "a hit keeps the rewrite"
            assert counters["inductor"]["fxgraph_cache_miss"] == misses and rewrites.fired["delta_activation"] == 1
            with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
                assert "fused_moe_lora_activation" not in compiled()
        with moelora_ops.compile.enable("shared_align"):
            assert "fused_moe_lora_activation" not in compiled(), "other names, another key"
        assert "fused_moe_lora_activation" not in compiled()
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0 and counters["inductor"]["fxgraph_cache_hit"] >= 3


class Counting(CustomGraphPass):
    """A pass of the user's."""

    calls = 0

    def __call__(self, graph: Any) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counting"


@pytest.mark.parametrize("cached", [True, False])
def test_a_pass_of_the_user_runs_as_well(cached: bool) -> None:
    """It runs first, and is what is left; one without a uuid keeps Inductor from caching, as it did before."""
    theirs = Counting()
    setting: Any = theirs if cached else lambda graph: theirs(graph)
    with config.patch(post_grad_custom_pre_pass=setting):
        handle = moelora_ops.compile.enable()
        assert (config.post_grad_custom_pre_pass.uuid() is not None) == cached
        try:
            with fresh_cache(), torch.no_grad():
                torch.compile(Aligns(), fullgraph=True)(Case("ids").make().topk_ids, Case("ids").make().token_lora_mapping)
        finally:
            handle.disable()
        assert theirs.calls == 1 and handle.fired["shared_align"] == 1
        assert config.post_grad_custom_pre_pass is setting


def test_switches_in_any_order() -> None:
    """Nested ones are removed in any order, twice if need be, and what somebody else installed meanwhile stays."""
    first, second = moelora_ops.compile.enable(), moelora_ops.compile.enable("shared_align")
    inner = config.post_grad_custom_pre_pass
    first.disable()
    assert config.post_grad_custom_pre_pass is inner and inner.before is None
    second.disable()
    second.disable()
    assert config.post_grad_custom_pre_pass is None
    with config.patch(post_grad_custom_pre_pass=None):
        outer = moelora_ops.compile.enable()
        with config.patch(post_grad_custom_pre_pass=None):
            outer.disable()
        assert config.post_grad_custom_pre_pass.names == (), "put back by somebody else, it does nothing"
        torch.compile(Aligns(), backend=REWRITTEN)(Case("ids").make().topk_ids, Case("ids").make().token_lora_mapping)
        assert outer.fired["shared_align"] == 0
    third, theirs = moelora_ops.compile.enable(), Counting()
    config.post_grad_custom_pre_pass = theirs
    third.disable()
    assert config.post_grad_custom_pre_pass is theirs
    config.post_grad_custom_pre_pass = None


def test_unknown_names_are_refused() -> None:
    """A rewrite that does not exist is named, with those that do."""
    with pytest.raises(ValueError, match="names must be among eager_lora, .* got 'fuse'"):
        moelora_ops.compile.enable("fuse")


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the versions and the way out; nothing else of the package is touched."""
    import importlib
    import sys

    for name in [n for n in sys.modules if n.startswith("moelora_ops.compile.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("_inductor", "delta_activation", "eager_lora", "expert_layer", "shared_align"):
        monkeypatch.delattr(moelora_ops.compile, name, raising=False)
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    with pytest.raises(UnsupportedError, match=r"known for 2\.11 to 2\.14; this is torch 3\.1\.0: leave enable\(\) out"):
        moelora_ops.compile.enable()
    monkeypatch.undo()
    importlib.import_module("moelora_ops.compile._inductor")
