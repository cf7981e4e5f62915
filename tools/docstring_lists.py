"""A Griffe extension for the API reference: lists of arguments become Markdown lists.

The docstrings of this repository describe arguments in paragraphs of lines like `name: text`, with
continuation lines indented. Markdown would run those lines together.
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


def as_lists(docstring: str) -> str:
    """Return the docstring with each paragraph of `name: text` entries made a list."""
    return "\n\n".join(map(_as_list, docstring.split("\n\n")))


def _as_list(paragraph: str) -> str:
    """Convert the entries of a paragraph; text before the first and after the last stays text."""
    lines = paragraph.split("\n")
    starts = [index for index, line in enumerate(lines) if _ENTRY.match(line)]
    if not starts:
        return paragraph
    first = starts[0]
    # The entries end at the first line that neither starts one nor continues one.
    end = next(
        (i for i in range(first, len(lines)) if not (i in starts or lines[i].startswith(" "))),
        len(lines),
    )
    text_follows = end < len(lines)
    if text_follows and not (lines[end - 1].endswith(".") and lines[end][:1].isupper()):
        return paragraph  # running text, in which a line happens to look like an entry
    entries = [_ENTRY.sub(r"- **\1**: ", line) for line in lines[first:end]]
    parts = ["\n".join(part) for part in (lines[:first], entries, lines[end:]) if part]
    return "\n\n".join(parts)


class DocstringLists(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)
