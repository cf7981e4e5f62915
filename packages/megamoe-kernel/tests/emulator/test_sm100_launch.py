"""What Python hands to the CUDA driver for the layer, taken by a driver of the test's own.

It refuses what the real one refuses of a tensor map, and runs the launch: the emulated kernel gets
the argument's bytes as they are, the tensor maps made from what was asked for, and the buffer and
the weights where the pointers say. So a field in the wrong place or a wrong size shows in the
result.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe_kernel import (
    fp8_nvfp4_mega_moe,
    get_symm_buffer_for_nvfp4_mega_moe,
    prepare_inputs,
    sm100_kernel,
    transform_nvfp4_weights_for_mega_moe,
)
from megamoe_kernel.jit import driver
from megamoe_kernel.jit.compile import KernelSource
from megamoe_kernel.launch import SHARED_BYTES
from megamoe_kernel.sm100_kernel import Tiling, all_tilings, pair_tilings, run_sm100_layer

pytest.importorskip("megamoe_kernel._native", reason="needs the compiled extension")

BOUND = 2e-3  # docs/kernel-contract.md
E, K, H, I = 8, 2, 512, 256  # noqa: E741
TOKENS, RING_ROWS = 20, 1024
#: Of 16 tokens; of pairs, 224: both are compiled into the emulator.
CASES = {"alone": all_tilings()[0], "pairs": pair_tilings()[1]}
CTAS = {1: 1, 2: 3}  # multiprocessors: of three, a pair leaves one idle
MAGIC = 0x7E45A907


class EmulatedMap(ctypes.Structure):
    """``EmulatedMap`` of csrc/emulator/copy_instructions.hpp."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("base", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("box_rows", ctypes.c_int32),
        ("box_bytes", ctypes.c_int32),
        ("other", ctypes.c_void_p),
    )


class LaunchRun(ctypes.Structure):
    """``LaunchRun`` of csrc/emulator/launch_run.hpp; a Problem is ten numbers."""

    _fields_ = (
        ("problem", ctypes.c_int32 * 10),
        ("num_ctas", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Launch:
    """cuLaunchKernelEx: its configuration, and the argument's bytes, aligned to 64."""

    grid: list[int]
    block: list[int]
    shared_bytes: int
    attributes: dict[int, list[int]]
    memory: ctypes.Array[ctypes.c_ubyte]
    at: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory) + self.at


@dataclass
class Driver:
    """libcuda as far as a launch needs it. argument_bytes: of the kernel's parameter."""

    argument_bytes: int
    launches: list[Launch] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    shared_bytes: int = 48 * 1024
    seen: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        self.seen.append(name)
        return lambda *arguments: 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: ctypes.c_int) -> int:  # noqa: N802
        assert attribute == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        assert value.value <= 227 * 1024
        self.shared_bytes = value.value
        return 0

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, to: ctypes.c_void_p, kind: int, rank: int, address: ctypes.c_void_p, sizes: Any,
        strides: Any, box: Any, steps: Any, interleave: int, swizzle: int, promotion: int,
        fill: int,
    ) -> int:  # fmt: skip
        base = address.value or 0
        assert (kind, rank) == (0, 2)  # CU_TENSOR_MAP_DATA_TYPE_UINT8
        assert (interleave, swizzle, fill) == (0, 3, 0)  # none; 128 bytes; zeros outside
        assert promotion in range(4)
        assert (to.value or 1) % 64 == 0
        assert base % 16 == 0
        assert strides[0] % 16 == 0
        assert all(0 < size <= 2**32 for size in sizes)
        assert all(0 < size <= 256 for size in box)
        assert list(steps) == [1, 1]
        assert box[0] <= 128  # the swizzle's width
        assert strides[0] == sizes[0]  # rows follow each other
        made = EmulatedMap(MAGIC, base, sizes[1], sizes[0], box[1], box[0], None)
        ctypes.memmove(to, ctypes.byref(made), ctypes.sizeof(made))
        self.maps.append({"base": base, "rows": sizes[1], "bytes": sizes[0], "box": list(box)})
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:  # noqa: N802
        given = config._obj
        memory = (ctypes.c_ubyte * (self.argument_bytes + 64))()
        at = -ctypes.addressof(memory) % 64
        ctypes.memmove(ctypes.addressof(memory) + at, pointers[0], self.argument_bytes)
        attributes = {
            given.attributes[i].id: list(given.attributes[i].value)[:3]
            for i in range(given.num_attributes)
        }
        assert len(attributes) == given.num_attributes
        assert given.shared_bytes <= self.shared_bytes
        self.launches.append(
            Launch(list(given.grid), list(given.block), given.shared_bytes, attributes, memory, at)
        )
        return 0


@dataclass
class Scene:
    """A GPU that is none: its driver, its multiprocessors, and the kernels that were asked for."""

    driver: Driver
    multiprocessors: int = 1
    sources: list[KernelSource] = field(default_factory=list)


def argument_offsets(library: ctypes.CDLL) -> list[int]:
    offsets = (ctypes.c_int64 * 32)()
    return list(offsets[: library.megamoe_sm100_arguments(offsets)])


@pytest.fixture
def scene(emulator_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(Driver(argument_offsets(emulator_library)[-1]))
    kept = (driver.tensor_map, driver._primary_context, sm100_kernel._load)

    def compile_kernel(source: KernelSource, target: str) -> SimpleNamespace:
        scene.sources.append(source)
        return SimpleNamespace(cubin=b"")

    def properties(device: object) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=scene.multiprocessors)

    monkeypatch.setattr(driver, "_libcuda", lambda: scene.driver)
    monkeypatch.setattr(driver, "read_cubin", lambda _: SimpleNamespace(kernels=["sm100_layer"]))
    monkeypatch.setattr(sm100_kernel, "compile_kernel", compile_kernel)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    for cached in kept:
        cached.cache_clear()
    yield scene
    for cached in kept:
        cached.cache_clear()


@dataclass(frozen=True)
class Call:
    """The layer's call: weights, a filled buffer, and the result's place."""

    l1: Any
    l2: Any
    shared: Any
    buffer: Any
    y: Tensor


@pytest.fixture
def call(make_layer: Any) -> Any:
    def make(with_shared: bool) -> Call:
        layer = make_layer(E, H, I)
        l1, l2 = transform_nvfp4_weights_for_mega_moe(layer.w13, layer.w2, arch="sm_100a")
        shared = None
        if with_shared:
            extra = make_layer(1, H, I, seed=7, largest=3.0)
            shared = transform_nvfp4_weights_for_mega_moe(extra.w13, extra.w2, arch="sm_100a")
        buffer = get_symm_buffer_for_nvfp4_mega_moe(
            num_experts=E, num_max_tokens_per_rank=TOKENS + 3, num_topk=K, hidden=H,
            intermediate=I, activation="nvfp4", ring_rows=RING_ROWS,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(TOKENS, H, generator=generator).to(torch.bfloat16)
        weights, ids = torch.rand(TOKENS, E, generator=generator).topk(K)
        prepare_inputs(x, buffer, topk_idx=ids, topk_weights=weights)
        return Call(l1, l2, shared, buffer, torch.full_like(x, float("nan")))

    return make


def launch(scene: Scene, call: Call, tiling: Tiling, **options: Any) -> Launch:
    scene.multiprocessors = CTAS[tiling.ctas]
    run_sm100_layer(
        call.y, call.l1, call.l2, call.buffer, shared=call.shared, tiling=tiling,
        **{"swiglu_limit": 10.0, **options},
    )  # fmt: skip
    return scene.driver.launches[-1]


def emulate(library: ctypes.CDLL, scene: Scene, found: Launch, ctas: int, seed: int = 0) -> str:
    """Runs the launch as it was asked for; why it was stopped, if it was."""
    shape = re.search(r"StaticShape<([\d, ]+)>", scene.sources[-1].function)
    assert shape is not None
    problem = (ctypes.c_int32 * 10)(*map(int, shape[1].split(", ")))
    run = LaunchRun(problem, found.grid[0], seed, found.address)
    message = ctypes.create_string_buffer(400)
    code = library.megamoe_emulate_launch(ctypes.byref(run), ctas, message, len(message))
    assert code != 2, message.value.decode()
    return message.value.decode()


@pytest.mark.parametrize("tiling", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "with_shared", [pytest.param(False, marks=pytest.mark.full), True], ids=["routed", "shared"]
)
def test_the_launch_runs_and_is_right(
    emulator_library: ctypes.CDLL, scene: Scene, call: Any, tiling: Tiling, with_shared: bool
) -> None:
    layer = call(with_shared)
    for seed in range(2):  # what a launch leaves in the buffer suits the next one
        layer.y.fill_(float("nan"))
        found = launch(scene, layer, tiling)
        assert emulate(emulator_library, scene, found, tiling.ctas, seed) == ""
        assert layer.buffer.failure() is None
        y_ref = torch.empty_like(layer.y)
        fp8_nvfp4_mega_moe(
            y_ref, layer.l1, layer.l2, layer.buffer, activation="nvfp4", swiglu_limit=10.0,
            shared=layer.shared, backend="reference",
        )  # fmt: skip
        error = (layer.y.double() - y_ref.double()).norm() / y_ref.double().norm()
        assert float(error) <= BOUND
    assert len(scene.sources) == 1


@pytest.mark.parametrize("tiling", CASES.values(), ids=CASES)
def test_the_launch_and_its_maps(scene: Scene, call: Any, tiling: Tiling) -> None:
    layer = call(True)
    found = launch(scene, layer, tiling)
    assert (found.grid, found.block) == ([tiling.ctas, 1, 1], [512, 1, 1])
    assert found.shared_bytes == scene.driver.shared_bytes == SHARED_BYTES
    # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, and CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION for pairs.
    cluster = {4: [2, 1, 1]} if tiling.ctas == 2 else {}
    assert found.attributes == {2: [1, 0, 0], **cluster}
    tokens = [
        {"base": layer.buffer.address(name), "rows": RING_ROWS, "bytes": columns // 2,
         "box": [128, 16]}
        for name, columns in (("ring_x", H), ("ring_h", I))
    ]  # fmt: skip
    weights = [
        {"base": each.weight.data_ptr(), "rows": each.num_experts * rows, "bytes": columns // 2,
         "box": [128, 128]}
        for first, second in ((layer.l1, layer.l2), layer.shared)
        for each, rows, columns in ((first, 2 * I, H), (second, H, I))
    ]  # fmt: skip
    assert scene.driver.maps == tokens + weights


def test_what_the_kernel_reads_of_the_call(
    emulator_library: ctypes.CDLL, scene: Scene, call: Any
) -> None:
    layer = call(False)
    for limit in (7.5, None):
        found = launch(scene, layer, all_tilings()[0], swiglu_limit=limit, wait_limit=12345)
        # From C++: of the last fields limit, num_tokens, output, rank_idx, wait_limit.
        at = dict(
            zip(
                ("limit", "num_tokens", "output", "rank_idx", "wait_limit"),
                argument_offsets(emulator_library)[-6:-1],
                strict=True,
            )
        )

        def read(kind: Any, name: str, found: Launch = found, at: dict[str, int] = at) -> Any:
            return kind.from_buffer(found.memory, found.at + at[name]).value

        assert read(ctypes.c_float, "limit") == (float("inf") if limit is None else limit)
        assert read(ctypes.c_int32, "num_tokens") == TOKENS
        assert read(ctypes.c_uint64, "output") == layer.y.data_ptr()
        assert read(ctypes.c_int32, "rank_idx") == 0
        assert read(ctypes.c_uint64, "wait_limit") == 12345


def test_no_token_is_a_launch_too(emulator_library: ctypes.CDLL, scene: Scene, call: Any) -> None:
    layer = call(False)
    none = Call(layer.l1, layer.l2, None, layer.buffer, layer.y[:0])
    found = launch(scene, none, all_tilings()[0])
    assert emulate(emulator_library, scene, found, 1) == ""
    assert bool(layer.y.isnan().all())
