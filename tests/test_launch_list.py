"""Launch lists: the words of a program, what C makes of them, and the layer op through one, all without a GPU.

The C function runs against a driver that writes down what it is asked to launch (execute_driver.cpp).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops.kernels import native
from moelora_ops.kernels.triton import _launch, experts
from moelora_ops.kernels.triton._launch import LaunchList, Slot, Unlisted, parameters
from moelora_ops.kernels.triton.call import TENSORS, prepare
from moelora_ops.routing import RoutingSizes
from moelora_ops.testing.cases import CASES, Case
from moelora_ops.testing.oracle import assert_bitwise

ROOT = Path(__file__).resolve().parent.parent
NVCC = os.environ.get("NVCC", "nvcc")
MAP = _launch._TensorMap((64, 1, 1024, 96), (98304, 98304, 96, 1), True)
COMPILED_MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 32], "fp4_padded": False}
NULL = (8, [native.VALUE, 0])  # scratch that no kernel of ours uses


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


@pytest.mark.parametrize(
    "descriptor, compiled",
    [
        ("tensordesc<bf16[1, 1, 64, 32]>", COMPILED_MAP),
        ("tensordesc<bf16[1,1,64,32],input_rank=4>", {**COMPILED_MAP, "is_im2col": False}),
    ],
    ids=["3.6", "3.9"],
)
def test_parameters_as_triton_orders_them(descriptor: str, compiled: dict[str, Any]) -> None:
    """Constants leave no trace; a descriptor is a map, sizes and strides; scratch comes last. Innermost dimension first."""
    types = ["*bf16", "constexpr", descriptor, "i32", "i64", "i1", "fp32", "constexpr"]
    values = [Slot(3, 256), None, (Slot(1, 16), MAP), -2, 2**40, True, 1.5, 128]
    pairs = parameters(types, values, [compiled])
    assert pairs[0] == (8, [native.ADDRESS, 3, 256])
    described = [3, 0, 4, 96, 1024, 1, 64, 192, 196608, 196608, 32, 64, 1, 1]  # swizzle, fill, rank, sizes, strides, box
    assert (pairs[1][0], pairs[1][1][:3], pairs[1][1][4:]) == (128, [native.TENSOR_MAP, 1, 16], described)
    assert pairs[1][1][3] == 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert pairs[2:6] == [(4, [native.VALUE, n]) for n in MAP.shape]
    assert pairs[6:10] == [(8, [native.VALUE, n]) for n in MAP.strides]
    scalars = [(4, 2**64 - 2), (8, 2**40), (1, 1), (4, bits(1.5))]
    assert pairs[10:] == [*((size, [native.VALUE, word]) for size, word in scalars), NULL, NULL]


@pytest.mark.parametrize(
    "kind, value, maps",
    [
        ("fp16", 1.0, []),
        (("*bf16", "i32"), (Slot(0), 1), []),
        ("nvTmaDesc", Slot(0), []),
        ("tensordesc<bf16[1,1,64,32]>", (Slot(0), MAP), []),
        ("tensordesc<bf16[1,1,64,32]>", (Slot(0), MAP), [None]),
        ("tensordesc<bf16[1,1,64,32]>", (Slot(0), MAP), [{**COMPILED_MAP, "fp4_padded": True}]),
        ("tensordesc_im2col<bf16[64,32]>", (Slot(0), MAP), [{**COMPILED_MAP, "is_im2col": True}]),
        ("tensordesc<bf16[1,1,64,32]>", (Slot(0), MAP._replace(plain=False)), [COMPILED_MAP]),
        ("tensordesc<bf16[1,1,64,32]>", (Slot(0), MAP._replace(shape=(1, 1, 600, 96))), [COMPILED_MAP]),
        ("i32", 1, [COMPILED_MAP]),
    ],
    ids=["half", "tuple", "nvTmaDesc", "unlowered", "no-map", "fp4", "im2col", "nan", "under-128-KiB", "map-too-many"],
)
def test_what_is_not_certain_is_left_to_triton(kind: Any, value: Any, maps: list[Any]) -> None:
    """Types, maps and paddings whose layout we do not know raise; so do maps that some drivers get wrong."""
    with pytest.raises(Unlisted):
        parameters([kind], [value], maps)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """csrc/cuda/execute.cu with the driver that writes down."""
    if shutil.which(NVCC) is None:
        pytest.skip("needs nvcc, the CUDA compiler")
    library = tmp_path_factory.mktemp("execute") / "execute.so"
    command = [NVCC, "-x", "c++", "-shared", "-std=c++17", "-cudart", "none"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    sources = [ROOT / "csrc" / "cuda" / "execute.cu", ROOT / "tests" / "execute_driver.cpp"]
    subprocess.run([*command, "-I", ROOT / "csrc" / "cuda", *sources, "-o", library], check=True, timeout=300)
    return ctypes.CDLL(str(library))


@pytest.fixture
def recorded(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call `native` against the driver; yields a function that returns and forgets what was launched."""
    argument_types: dict[str, tuple[Any, ...]] = {
        "execute": (ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p),
        "has_parameters": (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64),
    }
    for name, types in argument_types.items():
        entry = getattr(driver, f"moelora_{name}")
        entry.argtypes, entry.restype = types, ctypes.c_int
        monkeypatch.setattr(native, f"_{name.upper()}", entry)

    def take(next_error: int = 0) -> list[int]:
        words = (ctypes.c_uint64 * 4096)()
        count = driver.recorded(words, ctypes.c_uint64(4096))
        driver.forget(next_error)
        return list(words[:count])

    take()
    yield take
    take()


class Kernel:
    """A function handle of the driver: its parameters' sizes."""

    def __init__(self, *sizes: int) -> None:
        self.words = (ctypes.c_uint64 * (1 + len(sizes)))(len(sizes), *sizes)
        self.handle = ctypes.addressof(self.words)


def launch(kernel: Kernel, pairs: Sequence[tuple[int, list[int]]], dependent: int = 1) -> list[int]:
    return native.launch_words(kernel.handle, (5, 2, 1), 128, 4096, dependent, [words for _, words in pairs])


def test_program_launches_with_the_addresses_of_the_call(recorded: Any) -> None:
    """Grid, block, shared memory, dependence and stream; pointers moved by their offsets; scalars by value; the same again."""
    first, second = Kernel(8, 4, 4, 8, 8), Kernel(8, 8, 8)
    pairs = parameters(["*fp32", "i32", "fp32"], [Slot(1, 256), -7, 0.5], [])
    words = [*launch(first, pairs), *launch(second, parameters(["*i64"], [Slot(0)], []), dependent=0)]
    launches = LaunchList(words, 2)
    for base in (1 << 20, 1 << 44):
        assert launches(99, (base, 2 * base))
        assert recorded() == [
            *(first.handle, 5, 2, 1, 128, 4096, 99, 1, 2 * base + 256, 2**32 - 7, bits(0.5), 0, 0),
            *(second.handle, 5, 2, 1, 128, 4096, 99, 0, base, 0, 0),
        ]


def test_program_encodes_tensor_maps(recorded: Any) -> None:
    """Each call encodes its own map, over its own address."""
    pairs = parameters(["tensordesc<bf16[1,1,64,32]>"], [(Slot(1, 32), MAP)], [COMPILED_MAP])
    kernel = Kernel(*(size for size, _ in pairs))
    launches = LaunchList(launch(kernel, pairs), 2)
    for base in (4096, 1 << 40):
        assert launches(1, (0, base))
        got = recorded()[8:]
        assert got[:16] == [base + 32, 9, 3, 0, 4, 96, 1024, 1, 64, 192, 196608, 196608, 32, 64, 1, 1]
        assert got[16:] == [*MAP.shape, *MAP.strides, 0, 0]


def test_program_begins_with_route(recorded: Any) -> None:
    """The fields of RouteArgs, as `native.route` gives them: optional tensors are null, flags say which ids are wide."""
    sizes = RoutingSizes.of(num_pairs=12, num_experts=4, max_loras=2, max_rank=20, block_m=16, segment_m=32)
    ids, mapping = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    enabled, experts_of = torch.ones(2, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    slots = [Slot(0), Slot(1), Slot(2), Slot(3), Slot(4), Slot(5, 512)]
    words = native.route_words(ids, mapping, enabled, experts_of, slots, sizes, dependent=True)
    assert LaunchList(words, 6)(7, [100, 200, 300, 400, 500, 600])
    numbers = [12, 2, 4, 9, 2, 2, 16, 32, sizes.num_expert_blocks, sizes.num_segment_blocks, sizes.num_tiles, 1 + 4 + 8 + 16]
    assert recorded() == [0, 7, 100, 200, 400, 500, 300, 600 + 512, *numbers]
    slots = [Slot(0), Slot(1), None, None, None, Slot(5)]  # type: ignore[list-item]
    words = native.route_words(ids.int(), mapping.long(), None, None, slots, sizes, dependent=False)
    assert LaunchList(words, 6)(7, [100, 200, 0, 0, 0, 600])
    assert recorded() == [0, 7, 100, 200, 0, 0, 0, 600, *numbers[:3], 4, *numbers[4:11], 2]


def test_program_that_route_does_not_serve_launches_nothing(recorded: Any) -> None:
    """Sizes beyond route's (here: no rank tiles) make the whole list answer False."""
    sizes = RoutingSizes.of(num_pairs=12, num_experts=4, max_loras=0, max_rank=0, block_m=16, segment_m=32)
    ids, mapping = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    words = native.route_words(ids, mapping, None, None, [Slot(0), Slot(0), None, None, None, Slot(0)], sizes, dependent=False)
    words += launch(Kernel(8, 8, 8), parameters(["*i64"], [Slot(0)], []))
    assert not LaunchList(words, 1)(0, [0])
    assert recorded() == []


def test_first_error_ends_the_program(recorded: Any) -> None:
    """A launch that is refused raises with the driver's number, and nothing follows it; too many parameters are refused."""
    kernel = Kernel(8, 8, 8)
    pairs = parameters(["*i64"], [Slot(0)], [])
    recorded(next_error=701)
    with pytest.raises(RuntimeError, match="CUDA error 701"):
        LaunchList([*launch(kernel, pairs), *launch(kernel, pairs)], 1)(0, [0])
    assert len(recorded()) == 8 + 3
    with pytest.raises(RuntimeError, match="CUDA error 1$"):
        LaunchList(launch(kernel, [NULL] * 65), 1)(0, [0])
    assert recorded() == []


def test_loaded_kernel_must_have_these_parameters(recorded: Any) -> None:
    """Another number or size of parameters than ours is found out before the first launch."""
    kernel = Kernel(8, 4, 8, 8)
    assert native.has_parameters(kernel.handle, [8, 4, 8, 8])
    for sizes in ([8, 4, 8], [8, 4, 8, 8, 8], [8, 8, 8, 8], []):
        assert not native.has_parameters(kernel.handle, sizes)


def test_words_of_a_launch(recorded: Any) -> None:
    """What a compiled kernel says of itself, or Unlisted where it says anything unusual."""
    kernel = Kernel(8, 4, 8, 8)
    usual: dict[str, Any] = dict(
        num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0, num_warps=8, shared=1 << 16,
        launch_pdl=True, tensordesc_meta=None, target=SimpleNamespace(warp_size=32), instrumentation_mode="",
    )  # fmt: skip

    def words(signature: dict[str, str], **changes: Any) -> list[int]:
        bound = _launch.Launch(None, (6, 3), [None], (11,), {}, device=torch.device("cpu"), num_warps=8, names=("x",))
        bound._kernel = SimpleNamespace(arg_names=["x_ptr", "n", "BLOCK"])
        metadata = {name: value for name, value in {**usual, **changes}.items() if value != "missing"}
        bound._compiled = SimpleNamespace(
            metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature), run=print, function=kernel.handle
        )  # fmt: skip
        bound._tail = (11, 64)
        return bound.words({"x": Slot(2, 512)})

    signature = {"x_ptr": "*bf16", "n": "i32", "BLOCK": "constexpr"}
    parameters_ = [native.ADDRESS, 2, 512, native.VALUE, 11, native.VALUE, 0, native.VALUE, 0]
    assert words(signature) == [kernel.handle, 6, 3, 1, 256, 1 << 16, 1, 4, *parameters_]
    for change in (
        {"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 64}, {"profile_scratch_size": 64},
        {"target": SimpleNamespace(warp_size=64)}, {"instrumentation_mode": "gsan"}, {"shared": "missing"},
    ):  # fmt: skip
        with pytest.raises(Unlisted):
            words(signature, **change)
    for other in ({**signature, "n": "i64"}, {**signature, "n": "constexpr"}, {"x": "*bf16"}):
        with pytest.raises(Unlisted):
            words(other)


class Played:
    """A list that plays the stages of a plan under the interpreter, on tensors made of nothing but addresses and slots."""

    def __init__(self, plan: Any, slots: dict[str, Slot], args: Any, kwargs: Any) -> None:
        self.plan, self.slots, self.count = plan, slots, 0
        self.prepare(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.call = prepare(*args, **kwargs)
        return self.call

    def __call__(self, stream: int, addresses: Sequence[int]) -> bool:
        assert len(addresses) == len(TENSORS) + 2
        for name in TENSORS:
            tensor = getattr(self.call, name)
            assert tensor is None or addresses[self.slots[name].number] == tensor.data_ptr(), name
        sections = {name: (numel, dtype) for name, (_, numel, dtype) in self.plan.scratch.sections.items()}
        sections["out"] = (self.plan.num_tokens * self.plan.hidden_size, self.plan.dtype)
        memory = {name: self.tensor(addresses, name, *section) for name, section in sections.items()}
        routed = dict(memory)
        self.plan._prepare(self.call, routed)
        if "tables" in memory:
            memory["tables"].copy_(routed["tables"])
        values = self.plan._values(self.call, memory)
        for stage in self.plan.stages:
            stage(stream, *(name and values[name] for name in stage.names))
        self.count += 1
        return True

    def tensor(self, addresses: Sequence[int], name: str, numel: int, dtype: torch.dtype) -> Tensor:
        slot = self.slots[name]
        memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(addresses[slot.number] + slot.offset)
        return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.name in ("plain", "no-slot", "rank-8-in-64", "strided", "gpt-oss-like")),
        Case("direct", num_tokens=2, num_experts=16, bias=True),
        Case("splits", num_tokens=2, num_experts=2, top_k=1, hidden_size=291, ranks=(16, 3, 8)),
    ],
    ids=str,
)
def test_layer_through_a_list(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls like a first one run by its plan: from addresses and slots alone, with the bits of the plain way."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(experts, "_PLANS", {})
    args, kwargs = case.make().experts()
    experts.fused_experts_lora(*args, **kwargs)
    args, kwargs = case.make(seed=1).experts()
    want = experts.run_known(args, kwargs)
    (plan,) = experts._PLANS.values()
    assert plan.launches is None
    monkeypatch.setattr(LaunchList, "of", staticmethod(lambda stages, slots, count, first: slots))
    slots: Any = plan._list(experts.prepare(*args, **kwargs))
    played = Played(plan, slots, args, kwargs)
    monkeypatch.setattr(plan, "launches", played)
    # The way of a known call goes around `prepare`, or takes the addresses of the copies that it makes.
    monkeypatch.setattr(experts, "prepare", played.prepare if plan.copies else None)
    got = experts.run_known(args, kwargs)
    assert want is not None and got is not None and played.count == 1
    assert_bitwise(got, want)


def test_list_that_does_not_serve_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """False from a list (route does not serve these sizes) leaves the plain way, for good."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(experts, "_PLANS", {})
    args, kwargs = Case("given-up", num_tokens=2).make().experts()
    want = experts.fused_experts_lora(*args, **kwargs)
    (plan,) = experts._PLANS.values()
    monkeypatch.setattr(plan, "launches", lambda stream, addresses: False)
    got = experts.run_known(args, kwargs)
    assert got is not None and plan.launches is None and not plan.listable
    assert_bitwise(got, want)


def test_sections_of_scratch() -> None:
    """Aligned to 256 bytes; a section may lie on dead ones, and the buffer holds the longest."""
    scratch = _launch.Scratch(torch.bfloat16)
    free = scratch.add("tables", 3, torch.int32)
    assert free == 256
    assert scratch.add("z13", 300, torch.float32, at=free) == 256 + 1280
    assert scratch.add("z2", 1, torch.float32, at=free) == 512
    assert scratch.add("rows", 10, torch.bfloat16, at=512) == 768
    assert scratch.size == 1536 and scratch.numel == 768
    views = scratch.views(torch.zeros(768, dtype=torch.bfloat16))
    views["z2"].fill_(7.0)
    assert views["z13"][0] == 7.0 and views["z13"].shape == (300,) and not views["rows"].any()


def test_only_kernels_that_wait_are_launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dependent launch goes with the wait that the kernel is compiled with, whatever the device can do."""
    monkeypatch.setattr(_launch, "has_pdl", lambda device: True)

    def options(constants: dict[str, Any]) -> dict[str, Any]:
        return _launch.Launch(None, (1,), [], (), constants, device=torch.device("cpu"), num_warps=4)._options

    assert options({"USE_PDL": True})["launch_pdl"]
    assert "launch_pdl" not in options({"USE_PDL": False})
