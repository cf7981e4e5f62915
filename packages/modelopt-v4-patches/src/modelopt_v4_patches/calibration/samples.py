"""Texts to calibrate on: a local jsonl file, or a list."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvfp4_codec.checkpoint.header import shown

from ..errors import CalibrationError

logger = logging.getLogger(__name__)


def read_texts(dataset: Path | Sequence[str], num_samples: int) -> tuple[list[str], str]:
    """The first ``num_samples`` texts that are not blank, and a name for the dataset.

    Raises CalibrationError naming the line that is neither a text nor messages. Fewer texts than
    asked for are one WARNING; none is an error.
    """
    if isinstance(dataset, Path):
        lines, name = _read_jsonl(dataset)
    else:
        lines = iter(dataset)
        digest = hashlib.sha256("\0".join(dataset).encode()).hexdigest()
        name = f"{len(dataset)} texts, sha256 {digest}"
    texts: list[str] = []
    for text in lines:
        if len(texts) == num_samples:
            break
        if text.strip():
            texts.append(text)
    if not texts:
        raise CalibrationError(f"dataset {name}: no text in it.")
    if len(texts) < num_samples:
        logger.warning("dataset %s has %d samples, not %d", name, len(texts), num_samples)
    return texts, name


def dataset_name(path: Path) -> str:
    """A file's name and content, without the folder that it happens to lie in."""
    return f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _read_jsonl(path: Path) -> tuple[Iterator[str], str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"dataset {shown(str(path))}: {error.strerror}. A local jsonl file is wanted."
        ) from None

    def texts() -> Iterator[str]:
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield _text_of(line, f"dataset {shown(path.name)}, line {number}")

    return texts(), dataset_name(path)


def _text_of(line: bytes, where: str) -> str:
    """{"text": "..."}, or {"messages": [{"content": "..."}, ...]} one after the other."""
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    if isinstance(document, dict):
        if isinstance(text := document.get("text"), str):
            return text
        messages = document.get("messages")
        if isinstance(messages, list) and messages:
            contents = [one.get("content") for one in messages if isinstance(one, dict)]
            found = [content for content in contents if isinstance(content, str)]
            if len(found) == len(messages):
                return "\n".join(found)
    raise CalibrationError(
        f'{where}: expected {{"text": "..."}} or {{"messages": [{{"content": "..."}}]}}.'
    )
