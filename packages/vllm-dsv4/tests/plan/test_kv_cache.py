"""The KV cache by hand: bytes for each token and layer, and how many requests a memory holds."""

from __future__ import annotations

import pytest

from vllm_dsv4.plan import released
from vllm_dsv4.plan.kv_cache import kv_cache

PRO = kv_cache(released("pro").schema.config, 128)


def test_bytes_of_a_token_in_each_kind_of_layer() -> None:
    # 64 entries of 584 bytes in pages of multiples of 576; 132 bytes each in the indexer's.
    by_ratio = {ratio: (entries, indexer) for ratio, entries, indexer in PRO.per_layer}
    assert by_ratio == {4: (65 * 576 / 256, 15 * 576 / 256), 128: (3 * 576 / 256, 0.0)}
    assert PRO.token_bytes == (30 * (65 + 15) + 31 * 3) * 576 / 256
    mtp = kv_cache(released("pro").schema.config, 128, mtp=True)
    assert mtp.token_bytes == PRO.token_bytes  # a window only


def test_what_a_request_holds() -> None:
    compressed = 4096  # 1,048,576 tokens in blocks of 256
    window = 2 * (16511 // 64 + 1 + 1)  # 127 tokens and 16,384 in flight, in two groups
    states = (16391 + 3) // 4 + 1 + (16511 + 7) // 8 + 1
    assert PRO.blocks(1 << 20, 16384) == compressed + window + states
    # Between steps: three blocks of the window, three and 17 of the compressors' states.
    assert sum(g.settled(1 << 20) for g in PRO.groups) == compressed + 2 * 3 + 3 + 17


def test_the_longest_context_fits_exactly() -> None:
    memory = PRO.request_bytes(200_000, 16384)
    longest = PRO.longest(memory, 16384, 1 << 20)
    assert PRO.request_bytes(longest, 16384) <= memory < PRO.request_bytes(longest + 1, 16384)
    assert longest >= 200_000
    assert PRO.longest(memory, 16384, 5000) == 5000
    assert PRO.longest(1000, 16384, 1 << 20) == 0


def test_how_many_requests() -> None:
    memory = 10 * PRO.request_bytes(8192, 1000)
    assert PRO.concurrent(memory, 8192, 1000) == 10
    one = sum(group.settled(8192) for group in PRO.groups)
    prefill = sum(g.blocks(1000, 1000) for g in PRO.groups if g.window)
    room = (prefill + 7 * one) * PRO.block_bytes
    assert PRO.generating(room, 8192, 1000) == 7
    assert PRO.generating(room - 1, 8192, 1000) == 6
    assert PRO.generating(0, 8192, 1000) == 0


def test_a_stage_has_its_layers_only() -> None:
    config = released("pro").schema.config
    halves = [kv_cache(config, 128, here=span) for span in ((0, 31), (31, 61))]
    assert sum(half.token_bytes for half in halves) == pytest.approx(PRO.token_bytes)
