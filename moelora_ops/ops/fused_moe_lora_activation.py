"""The delta op with the activation behind it: not part of the public API, but what `moelora_ops.compile` puts for the two.

    out[t, k] = f( base_output[t, k] + concat_s( [w] * B_s[l, e] (A_s[l, e] x) ) )

f is silu(gate) * up, or gelu, gelu_tanh, relu2 in its place; of one slice it is f alone. Arguments and errors are those of
`fused_moe_lora` with offset 0 and slices that fill the width of the base, which is not written. Returns (T, K, N), dtype of the
base. On a GPU nothing is rounded between the delta and the result; on a CPU base + delta is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..kernels import native
from ..meta import fused_moe_lora, fused_moe_lora_activation as contract
from . import _library

_DELTA = native.op(fused_moe_lora.NAME, "cpu") or reference.fused_moe_lora


def _cpu(base_output: Tensor, *args: Any, activation: str = "silu", **kwargs: Any) -> Tensor:
    contract.check(base_output, *args, activation=activation, **kwargs)
    output = base_output.clone()
    _DELTA(output, *args, **kwargs)
    lora_b = args[2] if len(args) > 2 else kwargs["lora_b_stacked"]
    return reference.activate(output, activation, gated=len(lora_b) == 2, interleaved=False, alpha=0.0, limit=None)


def _cuda(base_output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    contract.check(base_output, *args, **kwargs)
    from ..kernels.triton import delta_activation

    return delta_activation.fused_moe_lora_activation(base_output, *args, **kwargs)


OP = _library.register(contract.SCHEMA, check=contract.check, fake=contract.fake, cpu=_cpu, cuda=_cuda)
_library.refuse_backward(OP, check=contract.check, cpu=_cpu, cuda=_cuda)
