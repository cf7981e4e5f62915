"""Numbers of tokens as vLLM reads them on its command line: ``128k``, ``128K``, ``25.6k``."""

from __future__ import annotations

import re
from typing import Final

from nvfp4_codec.checkpoint.header import shown

#: Longer ones are no number of anything here.
_COUNT: Final = re.compile(r"([0-9]{1,18})(\.[0-9]{1,18})?([kKmMgGtT]?)")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_count(text: str) -> int:
    """The number: k, m, g, t are powers of 1000, K, M, G, T of 1024, which take whole ones only.

    Source: vLLM 0.33.0, utils/argparse_utils.py, ``human_readable_int``. Raises ValueError, saying
    what is expected, for what vLLM would refuse.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{shown(repr(text))} is no whole number; give one such as 131072, 128K or 131.072k"
        )
    whole, fraction, suffix = found[1], found[2] or "", found[3]
    factor: int = (1024 if suffix.isupper() else 1000) ** _POWERS[suffix.lower()]
    if not fraction:
        return int(whole) * factor
    if not suffix.islower():
        raise ValueError(
            f"{text!r}: only k, m, g and t, the powers of 1000, take a fraction; give a whole "
            f"number{f' or {whole}{fraction}{suffix.lower()}' if suffix else ''}"
        )
    return int(float(whole + fraction) * factor)
