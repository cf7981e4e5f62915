"""Instructions on their own: those that the kernel does not use have no other tests here.

Each warp has a list of steps (csrc/emulator/step_run.hpp). What is stored to tensor memory is held
against the manual's figure, a box's bytes against the swizzle's formula; what is out of order or
out of place has to end the run under every seed, with its line.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

WARPS, COLUMNS = 8, 64  # of a CTA; allocated
#: Shared memory: ones come to the beginning, a box to where operand B is.
SHARED, BOX_AT, BOX_BYTES = 20 * 1024, 128 * 128, 16 * 128
OPS = ("alloc", "free", "meet warp", "meet", "meet pair", "fence before", "fence after", "store",
       "load", "init", "arrive", "expect", "wait", "fill", "box", "box to pair", "multiply",
       "commit")  # fmt: skip
ONE_LANE = {"init", "arrive", "expect", "fill", "box", "box to pair", "multiply", "commit"}


class _Step(ctypes.Structure):
    """``Step`` of csrc/emulator/step_run.hpp."""

    _fields_ = (
        ("warp", ctypes.c_int32), ("op", ctypes.c_int32), ("lanes", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in "abc"),
    )  # fmt: skip


class StepRun(ctypes.Structure):
    """``StepRun`` of csrc/emulator/step_run.hpp."""

    _fields_ = (
        ("steps", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("num_steps", "num_ctas", "cta_group", "rows", "row_bytes")
        ),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_void_p)
            for name in ("matrix", "values", "loaded", "on_its_way", "tensor", "shared")
        ),
    )


class Step(NamedTuple):
    """What the lanes of a warp do that have a bit in `lanes`."""

    op: str
    operands: tuple[int, ...]
    lanes: int


def step(op: str, *operands: int, lanes: int | None = None) -> Step:
    """By all lanes, or by the first one of what a single thread does."""
    of_op = 1 if op in ONE_LANE else 0xFFFFFFFF
    return Step(op, operands, of_op if lanes is None else lanes)


Steps = Sequence[Step]
#: Of some warps, counted through both CTAs.
Work = Mapping[int, Steps]
BEFORE, MEET, AFTER = step("fence before"), step("meet"), step("fence after")
ORDER = (BEFORE, MEET, AFTER)
IN_PAIR = (BEFORE, step("meet pair"), AFTER)


def in_turn(*turns: Work, ctas: int = 1, order: Steps = ORDER) -> Work:
    """Turns that all warps begin together, in this order. First tensor memory is allocated."""
    own = (step("alloc", COLUMNS), *(step("init", barrier, 1) for barrier in range(3)))
    ready = ORDER if ctas == 1 else IN_PAIR
    program: dict[int, list[Step]] = {}
    for warp in range(ctas * WARPS):
        first, *later = (turn.get(warp, ()) for turn in turns)
        begin = own if warp % WARPS == 0 else ()
        program[warp] = [*begin, *ready, *first]
        for steps in later:
            program[warp] += [*order, *steps]
    return program


@dataclass(frozen=True)
class Ended:
    """message: why the run was stopped. tensor: the words' bits, -1 where nobody wrote."""

    message: str
    loaded: Tensor  # [warps, 32, 16]
    on_its_way: list[int]  # by warp: copies in the other CTA, when its first wait ended
    tensor: Tensor  # [CTAs, 128, 512]
    shared: Tensor  # [CTAs, SHARED]


Run = Callable[..., Ended]


def named_values(ctas: int = 1) -> Tensor:
    """No two alike: [warps, lanes, values of one lane]."""
    return torch.arange(ctas * WARPS * 32 * 16, dtype=torch.float32).view(-1, 32, 16) + 1


@pytest.fixture
def run(emulator_library: ctypes.CDLL) -> Run:
    def run_steps(
        program: Work, *, seed: int = 0, ctas: int = 1, group: int = 1, matrix: Any = None
    ) -> Ended:
        matrix = torch.zeros(16, 128, dtype=torch.uint8) if matrix is None else matrix
        steps = [
            _Step(warp, OPS.index(op), lanes, *operands)
            for warp, listed in program.items()
            for op, operands, lanes in listed
        ]
        values = named_values(ctas)
        loaded = torch.full_like(values, float("nan"))
        on_its_way = torch.full((ctas * WARPS,), -1, dtype=torch.int32)
        tensor = torch.full((ctas, 128, 512), -1, dtype=torch.int32)
        shared = torch.zeros(ctas, SHARED, dtype=torch.uint8)
        array = (_Step * len(steps))(*steps)
        arguments = StepRun(
            ctypes.addressof(array), len(steps), ctas, group, *matrix.shape, seed,
            *(t.data_ptr() for t in (matrix, values, loaded, on_its_way, tensor, shared)),
        )  # fmt: skip
        message = ctypes.create_string_buffer(400)
        code = emulator_library.megamoe_emulate_steps(ctypes.byref(arguments), message, 400)
        text = message.value.decode()
        assert (code == 0) == (text == "")
        return Ended(text, loaded, on_its_way.tolist(), tensor, shared)

    return run_steps


def match(pattern: str, message: str) -> None:
    """It begins with the pattern and names a line of the steps."""
    assert re.fullmatch(rf"{pattern}.* \(step_run\.hpp:\d+\)", message), message


# What is stored to tensor memory.


def as_the_manual_has_it(columns: Sequence[int]) -> Tensor:
    """Tensor memory after warp w has stored named values to its quarter, from columns[w] on.

    The figure of .16x256b (PTX ISA 9.0, tcgen05 matrix fragments): of 16 lanes, the first and the
    second eight go to eight groups of four threads, of eight columns each thread has two; .x2 has
    eight columns more. The registers in their order, of lanes 0 to 15 and of 16 to 31:
    """
    registers = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    values, found = named_values(), torch.full((128, 512), -1, dtype=torch.int32)
    for warp, first in enumerate(columns):
        for lane, column in itertools.product(range(32), range(16)):
            thread = 4 * (lane % 8) + column % 8 // 2
            register = 4 * (column // 8) + 2 * (lane % 16 // 8) + column % 2
            value = values[warp, thread, registers[lane // 16][register]]
            found[32 * warp + lane, first + column] = value.view(torch.int32)
    return found


def store(warp: int, column: int = 0) -> Step:
    return step("store", 32 * (warp % 4), column)


def load(warp: int, column: int = 0) -> Step:
    return step("load", 32 * (warp % 4), column)


@pytest.mark.parametrize("columns", [(0, 0, 0, 0), (48, 3, 17, 32)], ids=str)
def test_a_store_is_where_the_manual_has_it(run: Run, columns: tuple[int, ...]) -> None:
    ended = run(in_turn({warp: [store(warp, at)] for warp, at in enumerate(columns)}))
    assert ended.message == ""
    assert torch.equal(ended.tensor[0], as_the_manual_has_it(columns))


def test_what_is_stored_is_loaded(run: Run) -> None:
    own = {warp: [store(warp, warp), load(warp, warp)] for warp in range(4)}
    ended = run(in_turn(own, {4 + warp: [load(warp, warp)] for warp in range(4)}))
    assert ended.message == ""
    stored = named_values()[:4]
    assert torch.equal(ended.loaded, torch.cat([stored, stored]))


NOT_ALLOCATED = "stores to tensor memory that is not allocated"
NOT_REACHED = "stores to lanes that its warp does not reach"
UNKNOWN = (
    r"stores to tensor memory (that is not allocated|without having waited for its allocation)"
)
NOT_FENCED = (
    "stores to tensor memory without having waited for its allocation, or without "
    "tcgen05.fence::after_thread_sync"
)


def after_allocation(*steps: Step) -> Work:
    """Steps of all warps between the allocation and another warp's store."""
    program = {warp: [*steps] for warp in range(WARPS)}
    program[0].insert(0, step("alloc", COLUMNS))
    program[1].append(store(1))
    return program


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("program", "message"),
    [
        pytest.param(in_turn({1: [store(0)]}), NOT_REACHED, id="another warp's quarter"),
        pytest.param(in_turn({0: [step("store", 16, 0)]}), NOT_REACHED, id="half of another's"),
        pytest.param(in_turn({3: [store(3, COLUMNS)]}), NOT_ALLOCATED, id="other columns"),
        pytest.param(in_turn({3: [store(3, COLUMNS - 8)]}), NOT_ALLOCATED, id="8 of other columns"),
        pytest.param(in_turn({3: [store(3, 504)]}), NOT_ALLOCATED, id="beyond the last column"),
        pytest.param(
            in_turn({0: [step("free", 0, COLUMNS)]}, {1: [store(1)]}), NOT_ALLOCATED, id="freed"
        ),
        pytest.param(
            {0: [step("alloc", COLUMNS)], 1: [store(1)]}, UNKNOWN, id="allocation not waited for"
        ),
        pytest.param(after_allocation(MEET), NOT_FENCED, id="no fence after the allocation"),
        pytest.param(
            after_allocation(MEET, AFTER._replace(lanes=0xFFFF7FFF)), NOT_FENCED,
            id="no fence in one lane",
        ),
        pytest.param(
            in_turn({2: [store(2)._replace(lanes=1), store(2, 16)._replace(lanes=0xFFFFFFFE)]}),
            "stores elsewhere than its warp's lanes", id="a lane elsewhere",
        ),
    ],
)  # fmt: skip
def test_a_store_to_a_wrong_place_is_refused(
    run: Run, seed: int, program: Work, message: str
) -> None:
    match(rf"rank 0 CTA 0 warp \d {message}", run(program, seed=seed).message)


def test_a_lane_that_does_not_store_is_waited_for(run: Run) -> None:
    ended = run(in_turn({2: [store(2)._replace(lanes=0x7FFFFFFF)]}))
    assert ended.message.startswith("threads wait for each other at a barrier or in a warp")
    assert bool((ended.tensor == -1).all())


FILL: Steps = (step("fill", 0, BOX_AT + BOX_BYTES), step("wait", 0), AFTER)
MULTIPLY = (step("multiply", 0, 0),)
COMMIT = (step("commit", 1), step("wait", 1), AFTER)
#: Two accesses of the same lanes and columns, what was there before, and what is found without
#: order, whichever comes first.
RACES: dict[str, tuple[Work, Work, Work, str]] = {
    "store, load": (
        {0: [store(0)]}, {0: [store(0)]}, {4: [load(4)]},
        r"warp 4 reads sums without waiting for rank 0 CTA 0 warp 0, which wrote it"
        r"|warp 0 stores to sums without waiting for rank 0 CTA 0 warp 4, which still reads it",
    ),
    "load, store": (
        {0: [store(0)]}, {0: [load(0)]}, {4: [store(4)]},
        r"warp 4 stores to sums without waiting for rank 0 CTA 0 warp 0, which still reads it"
        r"|warp 0 reads sums without waiting for rank 0 CTA 0 warp 4, which wrote it",
    ),
    "store, store": (
        {}, {1: [store(1)]}, {5: [store(5, 8)]},
        r"warp [15] stores to sums without waiting for rank 0 CTA 0 warp [15], which wrote it",
    ),
    "store, product": (
        {5: FILL}, {3: [store(3)]}, {5: MULTIPLY},
        r"warp 5 overwrites sums without waiting for rank 0 CTA 0 warp 3, which wrote it"
        r"|warp 3 stores to sums without waiting for rank 0 CTA 0's tensor cores, which wrote it",
    ),
    "product, store": (
        {5: FILL}, {5: [*MULTIPLY, *COMMIT]}, {3: [store(3)]},
        r"warp 3 stores to sums without waiting for rank 0 CTA 0's tensor cores, which wrote it"
        r"|warp 5 overwrites sums without waiting for rank 0 CTA 0 warp 3, which wrote it",
    ),
    "store to scales, product": (
        {5: FILL}, {3: [store(3, 40)]}, {5: MULTIPLY},
        r"warp 5 overwrites scales without waiting for rank 0 CTA 0 warp 3, which wrote it"
        r"|warp 3 stores to sums without waiting for rank 0 CTA 0's tensor cores, which wrote it",
    ),
    "store, free": (
        {}, {2: [store(2)]}, {0: [step("free", 0, COLUMNS)]},
        r"warp 0 frees tensor memory without waiting for rank 0 CTA 0 warp 2, which wrote it"
        r"|warp 2 stores to tensor memory that is not allocated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("race", RACES)
def test_in_order_all_is_well(run: Run, race: str, seed: int) -> None:
    *turns, _ = RACES[race]
    assert run(in_turn(*turns), seed=seed).message == ""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("race", RACES)
def test_without_order_it_is_refused(run: Run, race: str, seed: int) -> None:
    before, first, second, message = RACES[race]
    program = in_turn(before, {**first, **second})
    match(f"rank 0 CTA 0 ({message})", run(program, seed=seed).message)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("race", RACES)
def test_without_a_fence_after_meeting_it_is_refused(run: Run, race: str, seed: int) -> None:
    before, first, second, message = RACES[race]
    ((warp, (access, *_)),) = second.items()
    program = {w: [*steps, BEFORE, MEET] for w, steps in in_turn(before, first).items()}
    program[warp].append(access)
    found = run(program, seed=seed).message
    match(f"rank 0 CTA 0 ({message}), or without tcgen05.fence::after_thread_sync", found)


@pytest.mark.parametrize("seed", range(4))
def test_a_product_is_not_over_before_its_commit(run: Run, seed: int) -> None:
    message = run(in_turn({5: [*FILL, *MULTIPLY]}, {3: [store(3)]}), seed=seed).message
    match("rank 0 CTA 0 warp 3 stores to sums without waiting for .*'s tensor cores", message)


@pytest.mark.parametrize("seed", range(4))
def test_an_arrival_hands_a_store_over_after_a_fence(run: Run, seed: int) -> None:
    handed = [step("meet warp"), step("arrive", 2)]
    taken = [step("wait", 2), AFTER, load(4)]
    ended = run(in_turn({0: [store(0), BEFORE, *handed], 4: taken}), seed=seed)
    assert ended.message == ""
    assert torch.equal(ended.loaded[4], named_values()[0])
    message = run(in_turn({0: [store(0), *handed], 4: taken}), seed=seed).message
    match("rank 0 CTA 0 warp 0 hands over tensor memory without tcgen05.fence::before", message)


def test_a_product_adds_to_what_was_stored(run: Run) -> None:
    add = {4: [*FILL, step("multiply", 0, 1), *COMMIT]}
    ended = run(in_turn({warp: [store(warp)] for warp in range(4)}, add))
    assert ended.message == ""
    stored = as_the_manual_has_it([0] * 4)[:, :16].contiguous().view(torch.float32)
    assert torch.equal(ended.tensor[0, :, :16].contiguous().view(torch.float32), stored + 64)
    # A quarter is missing.
    ended = run(in_turn({warp: [store(warp)] for warp in range(3)}, add))
    assert "adds to sums that nobody has written" in ended.message


@pytest.mark.parametrize("seed", range(4))
def test_a_pair_s_product_and_a_store_in_the_other_cta(run: Run, seed: int) -> None:
    fill = {0: FILL, WARPS: FILL}
    # The commit arrives in both.
    ordered = {0: [*MULTIPLY, step("commit", 1)], WARPS: [step("wait", 1), AFTER, store(0)]}
    program = in_turn(fill, ordered, ctas=2, order=IN_PAIR)
    ended = run(program, seed=seed, ctas=2, group=2)
    assert ended.message == ""
    racing = in_turn(fill, {0: MULTIPLY, WARPS: [store(0)]}, ctas=2, order=IN_PAIR)
    match(
        r"rank 0 CTA (1 warp 0 stores to sums without waiting for rank 0 CTA 0's tensor cores"
        r"|0 warp 0 overwrites sums without waiting for rank 0 CTA 1 warp 0), which wrote it",
        run(racing, seed=seed, ctas=2, group=2).message,
    )


# Boxes to both CTAs of a pair.

EXPECT, WAIT = step("expect", 0, BOX_BYTES), step("wait", 0)


@pytest.fixture(scope="module")
def matrix() -> Tensor:
    """Neither rows nor columns are a multiple of a box's 16 and 128."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (40, 320), generator=generator, dtype=torch.uint8)


def box_of(matrix: Tensor, x: int, y: int) -> Tensor:
    """16 rows of 128 bytes, zeros beyond the matrix."""
    found = matrix.new_zeros(16, 128)
    inside = matrix[y : y + 16, x : x + 128]
    found[: inside.shape[0], : inside.shape[1]] = inside
    return found


def swizzled(box: Tensor) -> Tensor:
    """Of 128 bytes: chunk c of 16 bytes of row r comes to place c ^ (r % 8)."""
    found = torch.zeros_like(box)
    for row, chunk in itertools.product(range(16), range(8)):
        place = chunk ^ (row % 8)
        found[row, 16 * place : 16 * place + 16] = box[row, 16 * chunk : 16 * chunk + 16]
    return found.flatten()


def to_pair(begins: int, x: int = 0, y: int = 0, expect: Step = EXPECT) -> Work:
    """One CTA begins, the other has `expect`; both wait."""
    own = [EXPECT, step("box to pair", x, y, 0), WAIT]
    return {begins * WARPS: own, (1 - begins) * WARPS: [expect, WAIT]}


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (128, 8), (256, 32)])
def test_a_box_comes_to_both(run: Run, matrix: Tensor, x: int, y: int, begins: int) -> None:
    alone = [EXPECT, step("box", x, y, 0), WAIT]
    each = run(in_turn({0: alone, WARPS: alone}, ctas=2), ctas=2, matrix=matrix)
    assert each.message == ""
    for seed in range(4):
        ended = run(in_turn(to_pair(begins, x, y), ctas=2), seed=seed, ctas=2, matrix=matrix)
        assert ended.message == ""
        for shared, of_its_own in zip(ended.shared, each.shared, strict=True):
            arrived = shared[BOX_AT : BOX_AT + BOX_BYTES]
            assert torch.equal(arrived, swizzled(box_of(matrix, x, y)))
            # The rest is as it was, and all is as each CTA's own copy leaves it.
            assert torch.equal(shared, of_its_own)


def test_the_two_copies_end_in_any_order(run: Run, matrix: Tensor) -> None:
    program = in_turn(to_pair(0), ctas=2)
    seen = {
        tuple(run(program, seed=seed, ctas=2, matrix=matrix).on_its_way[::WARPS])
        for seed in range(40)
    }
    assert {(1, 0), (0, 1)} <= seen


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize(
    "expect",
    [step("fence after"), step("expect", 0, BOX_BYTES - 16), step("expect", 0, BOX_BYTES + 16)],
    ids=["none", "fewer", "more"],
)
@pytest.mark.parametrize("seed", range(2))
def test_the_other_cta_has_to_expect_the_bytes(
    run: Run, seed: int, expect: Step, begins: int
) -> None:
    ended = run(in_turn(to_pair(begins, expect=expect), ctas=2), seed=seed, ctas=2)
    match(f"rank 0 CTA {1 - begins} warp 0 waits in vain", ended.message)


#: What else a product needs.
ONES: Steps = (step("fill", 2, BOX_AT), step("wait", 2), AFTER)


@pytest.mark.parametrize("seed", range(2))
def test_both_can_multiply_what_came(run: Run, matrix: Tensor, seed: int) -> None:
    used = {warp: [*ONES, *steps, AFTER, *MULTIPLY, *COMMIT] for warp, steps in to_pair(0).items()}
    ended = run(in_turn(used, ctas=2), seed=seed, ctas=2, matrix=matrix)
    assert ended.message == ""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = box_of(matrix, 0, 0)[:, :32].int()
    sums = (e2m1[codes & 15] + e2m1[codes >> 4]).sum(1).expand(128, 16).contiguous()
    for tensor in ended.tensor:
        assert torch.equal(tensor[:, :16].contiguous().view(torch.float32), sums)


@pytest.mark.parametrize("seed", range(8))
def test_an_arrival_without_bytes_does_not_hand_the_box_over(run: Run, seed: int) -> None:
    used = dict(to_pair(0, expect=step("arrive", 0)))
    used[WARPS] = [*ONES, *used[WARPS], AFTER, *MULTIPLY]
    match(
        "rank 0 CTA 1 warp 0 (waits in vain|multiplies a stage"
        "(, which nobody has written| without waiting for rank 0 CTA 0 warp 0, which wrote it))",
        run(in_turn(used, ctas=2), seed=seed, ctas=2).message,
    )


@pytest.mark.parametrize("seed", range(8))
def test_bytes_at_one_barrier_do_not_hand_over_the_other_cta_s(run: Run, seed: int) -> None:
    # A pair's product, begun by a warp that waited in its own CTA alone.
    early = {0: [EXPECT, step("box to pair", 0, 0, 0)], WARPS: [EXPECT], 1: [WAIT, *MULTIPLY]}
    program = in_turn({0: ONES, WARPS: ONES}, early, ctas=2, order=IN_PAIR)
    match(
        "rank 0 CTA 0 warp 1 multiplies a stage without waiting for rank 0 CTA 0 warp 0",
        run(program, seed=seed, ctas=2, group=2).message,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_other_cta_s_own_copy_to_the_same_place_is_refused(run: Run, seed: int) -> None:
    racing = dict(to_pair(0))
    racing[WARPS] = [step("expect", 1, BOX_BYTES), step("box", 0, 0, 1), *racing[WARPS]]
    match(
        r"rank 0 CTA \d warp 0 copies to a stage "
        r"(whose content nobody has used|without waiting for rank 0 CTA \d warp 0)",
        run(in_turn(racing, ctas=2), seed=seed, ctas=2).message,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_stage_is_used_before_it_is_filled_again(run: Run, seed: int) -> None:
    again = [*FILL, step("fill", 1, BOX_AT + BOX_BYTES)]
    match(
        "rank 0 CTA 0 warp 0 copies to a stage whose content nobody has used",
        run(in_turn({0: again}), seed=seed).message,
    )
    used = [*FILL, *MULTIPLY, *COMMIT, step("fill", 2, BOX_AT + BOX_BYTES)]
    assert run(in_turn({0: used}), seed=seed).message == ""
