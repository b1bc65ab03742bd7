"""Without a GPU the Triton kernels run under Triton's interpreter, which must be chosen before triton is first imported.

Property tests draw the same examples every time; `HYPOTHESIS_PROFILE=random` draws new ones.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # the GPU tests do without
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True)
    settings.register_profile("random")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code, no counts and no pass from another test."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    yield
    assert config.post_grad_custom_pre_pass is None
