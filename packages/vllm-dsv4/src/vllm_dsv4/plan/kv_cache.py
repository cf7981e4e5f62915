"""Memory of the KV cache of DeepSeek-V4's compressed attention, as vLLM 0.33.0 lays it out.

Every layer keeps a window of the last tokens. A compressed layer also keeps one entry for each 4
or 128 tokens of the whole context, and the compressor's raw inputs for the tokens that are not
compressed yet. Layers at ratio 4 keep the same two things once more for their indexer. All of
these are cut into pages, and pages of layers that advance together into blocks; every block of the
pool has the size of the largest kind.

Sources: vLLM 0.33.0, models/deepseek_v4/attention.py (get_kv_cache_spec of DeepseekV4Attention and
DeepseekV4IndexerCache), compressor.py (CompressorStateCache), v1/attention/backends/mla/
sparse_swa.py (DeepseekV4SWACache), v1/kv_cache_interface.py (page sizes, pages per request),
v1/core/kv_cache_planning.py (groups). The tests hold this against vLLM's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from nvfp4_codec.schemas.deepseek_v4 import ModelConfig

#: Tokens of a block of compressed entries (--block-size), and of a block of the window.
BLOCK: Final = 256
_WINDOW_BLOCK: Final = 64
#: fp8_ds_mla: 448 E4M3 values, 64 BF16 rope values and 8 bytes of scales for each entry.
_ENTRY: Final = 584
#: Pages of that layout are multiples of this, for the kernel's loads.
_ALIGNMENT: Final = 576
_FP32: Final = 4
#: Tokens of a block of a compressor's state, by ratio.
_STATE_BLOCK: Final = {4: 4, 128: 8}


@dataclass(frozen=True)
class Group:
    """Layers whose pages make one kind of block.

    tokens: that a block covers. window: how many of the last tokens are kept; None keeps all.
    page_bytes: of all its pages together.
    """

    tokens: int
    window: int | None
    page_bytes: int

    def blocks(self, context: int, in_flight: int) -> int:
        """Blocks that one request of ``context`` tokens may hold at a time.

        in_flight: tokens of scheduled steps, whose pages are only freed when the steps are done.
        """
        if self.window is None:
            return math.ceil(context / self.tokens)
        return math.ceil(min(self.window - 1 + in_flight, context) / self.tokens) + 1

    def settled(self, context: int) -> int:
        """Blocks that a request holds between its steps, while it generates one token a step."""
        return self.blocks(context, 1)


@dataclass(frozen=True)
class KVCache:
    """The cache of the layers of one GPU."""

    groups: tuple[Group, ...]
    per_layer: tuple[tuple[int, float, float], ...]

    @cached_property
    def block_bytes(self) -> int:
        """Of one block of the pool."""
        return max((group.page_bytes for group in self.groups), default=0)

    @property
    def token_bytes(self) -> float:
        """What one more token of context costs: the compressed entries of all layers."""
        return sum(self.block_bytes / group.tokens for group in self.groups if group.window is None)

    def blocks(self, context: int, in_flight: int) -> int:
        """Blocks that a request of ``context`` tokens needs to be admitted."""
        return sum(group.blocks(context, in_flight) for group in self.groups)

    def request_bytes(self, context: int, in_flight: int) -> int:
        """The same in bytes."""
        return self.blocks(context, in_flight) * self.block_bytes

    def longest(self, memory: int, in_flight: int, most: int) -> int:
        """The longest context, up to ``most`` tokens, that one request may have; 0 if none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle, in_flight) <= memory:
                low = middle
            else:
                high = middle - 1
        return low

    def concurrent(self, memory: int, context: int, in_flight: int) -> float:
        """How many requests of that length fit, as vLLM prints it when it starts.

        It supposes that every one of them is in its prefill.
        """
        return (memory // self.block_bytes) / self.blocks(context, in_flight)

    def generating(self, memory: int, context: int, in_flight: int) -> int:
        """How many requests of that length can generate at once, one step of prefill besides."""
        prefill = sum(
            group.blocks(in_flight, in_flight) for group in self.groups if group.window is not None
        )
        settled = sum(group.settled(context) for group in self.groups)
        return max(0, memory // self.block_bytes - prefill) // settled


#: Tokens of a block, the window, and by page size the layers that have such a page.
_Kind = tuple[int, int | None, dict[int, list[int]]]


def kv_cache(
    config: ModelConfig, window: int, *, mtp: bool = False, here: tuple[int, int] | None = None
) -> KVCache:
    """The cache of the main layers, and with ``mtp`` of the MTP blocks behind them.

    window: sliding_window of config.json, all that MTP blocks have. here: first and one past the
    last layer of a pipeline stage; blocks are made over all layers and then divided. Tensor
    parallelism divides nothing: every rank holds all of it.
    """
    ratios = [block.ratio for block in config.blocks if block.kind == "layers"]
    if mtp:
        ratios += [0 for block in config.blocks if block.kind == "mtp"]
    first, end = here or (0, len(ratios))
    local = range(first, len(ratios) if end == config_layers(config) else end)
    head, index = config.dimensions["head_dim"], config.dimensions["index_dim"]
    at: dict[int, list[int]] = {
        ratio: [layer for layer, own in enumerate(ratios) if own == ratio] for ratio in (4, 128)
    }
    kinds: list[_Kind] = [
        (
            BLOCK,
            None,
            _by_size(
                (_page(BLOCK // 4 * _ENTRY), at[4]),
                (_page(BLOCK // 4 * _index_entry(index)), at[4]),
                (_page(BLOCK // 128 * _ENTRY), at[128]),
            ),
        ),
        (
            _WINDOW_BLOCK,
            window,
            _by_size((_page(_WINDOW_BLOCK * _ENTRY), list(range(len(ratios))))),
        ),
        # Windows of ratio 4 overlap.
        (
            _STATE_BLOCK[4],
            2 * 4,
            _by_size((_state_page(4, head), at[4]), (_state_page(4, index), at[4])),
        ),
        (_STATE_BLOCK[128], 128, _by_size((_state_page(128, head), at[128]))),
    ]
    groups = tuple(
        Group(tokens, kept, sum(size * len(set(local).intersection(layers)) for size, layers in
                                pages.items()))
        for tokens, kept, pages in _grouped([kind for kind in kinds if kind[2]])
    )  # fmt: skip
    return KVCache(groups, tuple(_per_layer([ratios[layer] for layer in local], index)))


def config_layers(config: ModelConfig) -> int:
    """Main layers."""
    return sum(block.kind == "layers" for block in config.blocks)


def _by_size(*pages: tuple[int, list[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for size, layers in pages:
        if layers:
            found.setdefault(size, []).extend(layers)
    return found


def _page(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def _index_entry(index_dim: int) -> int:
    """E4M3 values with one float32 scale for 128 of them."""
    return index_dim + index_dim // 128 * _FP32


def _state_page(ratio: int, width: int) -> int:
    """A compressor's inputs: key and gate, at ratio 4 each twice as wide."""
    overlap = 2 if ratio == 4 else 1
    return _page(_STATE_BLOCK[ratio] * 2 * overlap * width * _FP32)


def _per_layer(ratios: Sequence[int], index: int) -> list[tuple[int, float, float]]:
    """Ratio, bytes per token of the compressed entries, and of the indexer's."""
    found = []
    for ratio in sorted(set(ratios)):
        entries = _page(BLOCK // ratio * _ENTRY) / BLOCK if ratio else 0.0
        indexed = _page(BLOCK // 4 * _index_entry(index)) / BLOCK if ratio == 4 else 0.0
        found.append((ratio, entries, indexed))
    return found


def _grouped(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Kinds of which every page size occurs equally often are cut into parts of equal length.

    The length is the one that wastes least when each is rounded up to it, the longest of these,
    and no less than a kind of several page sizes is long, which stays whole.
    """
    lengths = [max(len(layers) for layers in pages.values()) for _, _, pages in kinds]
    even = [len({len(layers) for layers in pages.values()}) == 1 for _, _, pages in kinds]
    several = [len(pages) > 1 for _, _, pages in kinds]
    least = max((n for n, a, b in zip(lengths, even, several, strict=True) if a and b), default=0)
    if not least:
        return list(kinds)
    length = _least_waste([n for n, a in zip(lengths, even, strict=True) if a], least)
    found: list[_Kind] = []
    for (tokens, window, pages), own, is_even in zip(kinds, lengths, even, strict=True):
        parts = math.ceil(own / length) if is_even else 1
        found += [
            (tokens, window, {size: layers[part::parts] for size, layers in pages.items()})
            for part in range(parts)
        ]
    return found


def _least_waste(lengths: Sequence[int], least: int) -> int:
    candidates = range(least, max(lengths) + 1)
    return min(candidates, key=lambda n: (sum(-length % n for length in lengths), -n))
