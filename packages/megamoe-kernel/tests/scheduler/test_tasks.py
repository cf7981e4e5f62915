"""The list of tasks: complete, divided among CTAs, and ordered so that nothing waits forever."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

Task = tuple[int, int, int]  # layer, block, part

SIZES = [
    # num_blocks, wave_blocks, l1 tasks, l2 tasks
    (0, 1, 2, 1),
    (1, 1, 1, 1),
    (1, 4, 2, 3),
    (5, 1, 2, 3),
    (7, 3, 3, 2),
    (8, 4, 48, 56),
    (9, 16, 2, 2),
    (64, 8, 2, 2),
]


def problem(wave_blocks: int, l1_tasks: int, l2_tasks: int, block_rows: int = 8) -> Any:
    hidden, intermediate = 128 * l2_tasks, 64 * l1_tasks
    ring_rows = 2 * wave_blocks * block_rows
    return (ctypes.c_int32 * 10)(
        1, 1, 0, 1, hidden, intermediate, ring_rows, block_rows, wave_blocks, 128
    )


def tasks(
    library: ctypes.CDLL, sizes: tuple[int, int, int, int], first: int = 0, stride: int = 1
) -> list[Task]:
    num_blocks, wave_blocks, l1_tasks, l2_tasks = sizes
    capacity = num_blocks * (l1_tasks + l2_tasks) + 1  # one more, to see too many
    out = (ctypes.c_int32 * (3 * capacity))()
    count = library.megamoe_tasks(
        problem(wave_blocks, l1_tasks, l2_tasks), num_blocks, first, stride, out, capacity
    )
    return [(out[3 * i], out[3 * i + 1], out[3 * i + 2]) for i in range(count)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_task_is_there_once(
    host_library: ctypes.CDLL, sizes: tuple[int, int, int, int]
) -> None:
    num_blocks, _, l1_tasks, l2_tasks = sizes
    expected = {(1, block, part) for block in range(num_blocks) for part in range(l1_tasks)}
    expected |= {(2, block, part) for block in range(num_blocks) for part in range(l2_tasks)}
    listed = tasks(host_library, sizes)
    assert len(listed) == len(expected)
    assert set(listed) == expected


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("num_ctas", [1, 2, 7, 132])
def test_ctas_share_the_list(
    host_library: ctypes.CDLL, sizes: tuple[int, int, int, int], num_ctas: int
) -> None:
    place = {task: i for i, task in enumerate(tasks(host_library, sizes))}
    shares = [tasks(host_library, sizes, cta, num_ctas) for cta in range(num_ctas)]
    for share in shares:
        places = [place[task] for task in share]
        assert places == sorted(places)
    assert sorted(task for share in shares for task in share) == sorted(place)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ctas_that_draw_numbers_share_the_list(
    host_library: ctypes.CDLL, sizes: tuple[int, int, int, int]
) -> None:
    listed = tasks(host_library, sizes)
    num_blocks, wave_blocks, l1_tasks, l2_tasks = sizes
    chance = random.Random(1)
    owners = [chance.randrange(7) for _ in range(len(listed) + 9)]  # some draw after the last task
    for cta in range(7):
        drawn = [number for number, owner in enumerate(owners) if owner == cta]
        out = (ctypes.c_int32 * (3 * len(drawn)))()
        found = host_library.megamoe_tasks_at(
            problem(wave_blocks, l1_tasks, l2_tasks),
            num_blocks,
            (ctypes.c_int32 * len(drawn))(*drawn),
            len(drawn),
            out,
        )
        there = [(out[3 * i], out[3 * i + 1], out[3 * i + 2]) for i in range(found)]
        assert there == [listed[number] for number in drawn if number < len(listed)]


@pytest.mark.parametrize(("l1_tasks", "l2_tasks", "num_ctas"), [(48, 56, 132), (24, 28, 66)])
def test_no_cta_works_longer_than_by_turns(
    host_library: ctypes.CDLL, l1_tasks: int, l2_tasks: int, num_ctas: int
) -> None:
    """Pro: a task of L1 has 7168 columns, one of L2 3072. A single token's six blocks are 3.27 L1
    tasks for each CTA; by turns alone, some had 18 % more."""
    columns = {1: 7168, 2: 3072}

    def longest(shares: list[list[Task]]) -> int:
        return max(sum(columns[layer] for layer, _, _ in share) for share in shares)

    for num_blocks in range(1, 40):
        sizes = num_blocks, 11, l1_tasks, l2_tasks
        listed = tasks(host_library, sizes)
        shares = [tasks(host_library, sizes, cta, num_ctas) for cta in range(num_ctas)]
        turns = [listed[cta::num_ctas] for cta in range(num_ctas)]
        assert longest(shares) <= longest(turns)
        if num_blocks == 6:
            mean = sum(columns[layer] for layer, _, _ in listed) / num_ctas
            assert longest(shares) < 1.05 * mean < 1.15 * mean < longest(turns)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whatever_a_task_waits_for_comes_before_it(
    host_library: ctypes.CDLL, sizes: tuple[int, int, int, int]
) -> None:
    num_blocks, wave_blocks, l1_tasks, l2_tasks = sizes
    ring = 2 * wave_blocks  # the smallest that is allowed
    done = {1: [0] * num_blocks, 2: [0] * num_blocks}
    for layer, block, _ in tasks(host_library, sizes):
        if layer == 1 and block >= ring:
            # Its tokens need the ring slot, which the block before has until L2 is through.
            assert done[2][block - ring] == l2_tasks
        if layer == 2:
            assert done[1][block] == l1_tasks
        done[layer][block] += 1


def test_neighbours_read_the_same_weights(host_library: ctypes.CDLL) -> None:
    listed = tasks(host_library, (8, 4, 48, 56))
    assert listed[:4] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0)]
    assert listed[4:6] == [(1, 0, 1), (1, 1, 1)]


def test_l2_is_a_wave_behind(host_library: ctypes.CDLL) -> None:
    waves = [(layer, block // 4) for layer, block, _ in tasks(host_library, (12, 4, 2, 3))]
    order = [wave for i, wave in enumerate(waves) if i == 0 or waves[i - 1] != wave]
    assert order == [(1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)]
