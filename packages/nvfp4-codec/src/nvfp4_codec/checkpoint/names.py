"""Names that an output may have: each once, and none that the writing itself uses.

The names come from the input, which somebody else wrote. They are all compared before the
first byte is written.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .header import shown
from .writer import TEMP_SUFFIX

if TYPE_CHECKING:
    from .job import Shard


def check_names(own: Iterable[str], shards: Iterable[Shard], documents: Iterable[str]) -> None:
    """CheckpointError if two tensors or two files would get one name, or a file a taken one.

    own: the names of what records the progress.
    """
    shards = tuple(shards)
    _check_tensors(shards)
    taken = dict.fromkeys(own, "what records the progress")
    taken.update((name, "another file of the output") for name in documents)
    for shard in shards:
        name = os.path.normpath(shard.file)
        pure = PurePosixPath(name)
        used = next((taken[str(p)] for p in (pure, *pure.parents) if str(p) in taken), None)
        used = used or next((w for t, w in taken.items() if t.startswith(f"{name}/")), None)
        if pure.name.startswith(".") and pure.name.endswith(TEMP_SUFFIX):
            used = "files that are being written"
        if used is not None:
            raise CheckpointError(
                f"the name is needed for {used}; expected a name of its own, ending in "
                ".safetensors. Rename the input's file, and its entries in the index.",
                file=shown(shard.file),
            )
        taken[name] = "another file of the output"


def _check_tensors(shards: Iterable[Shard]) -> None:
    places: dict[str, str] = {}
    for shard in shards:
        for spec in shard.specs:
            if spec.name in places:
                raise CheckpointError(
                    f"would be written twice: here and in {shown(places[spec.name])}. Two weights "
                    "of the input give this name; --exclude one of them, or rename it.",
                    file=shown(shard.file),
                    tensor=shown(spec.name),
                )
            places[spec.name] = shard.file
