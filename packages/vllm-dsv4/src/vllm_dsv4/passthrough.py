"""What the user has already said to ``vllm serve``: read from its arguments, never changed.

Only as much is understood as is needed not to say it twice: names in both spellings
(``--max_model_len``), values after ``=`` or a blank, short forms, JSON objects given as a whole or
by dotted names (``--kernel-config.moe_backend``), and a ``--config`` file, which vLLM ranks below
the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from .counts import read_count
from .errors import OptionError

_SHORT: Final[Mapping[str, str]] = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
}


class Passthrough:
    """The user's arguments for vLLM.

    Raises OptionError for a --config file that cannot be read.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)
        self._values: dict[str, list[str | None]] = {}
        for position, argument in enumerate(self.arguments):
            name, value = _split(argument)
            if name is None:
                continue
            if value is None and position + 1 < len(self.arguments):
                following = self.arguments[position + 1]
                value = None if following.startswith("-") and len(following) > 1 else following
            self._values.setdefault(name, []).append(value)
        if file := self.value("config"):
            for name, value in _config_file(Path(file)).items():
                self._values.setdefault(name.replace("_", "-"), [value])

    def has(self, *names: str) -> bool:
        """Whether one of these options was given, also as ``--no-...`` or in parts."""
        return any(
            given == name or given == f"no-{name}" or given.startswith(f"{name}.")
            for given in self._values
            for name in names
        )

    def value(self, name: str) -> str | None:
        """The last value of an option; None if it was not given, or is a switch."""
        return self._values.get(name, [None])[-1]

    def integer(self, name: str) -> int | None:
        """The same as a whole number; None also where vLLM takes a word instead ("auto", "-1").

        Raises OptionError for 0, and for what begins like a number and is none.
        """
        value = self.value(name)
        if value is None or not value[:1].isdecimal():
            return None
        try:
            found = read_count(value)
        except ValueError as error:
            raise OptionError(f"--{name}: {error}.") from None
        if found < 1:
            raise OptionError(f"--{name} is {value}; at least 1 is needed.")
        return found

    def part(self, name: str) -> float | None:
        """The same as a part of one; raises OptionError for what is none."""
        value = self.value(name)
        try:
            found = None if value is None else float(value)
        except ValueError:
            raise OptionError(f"--{name} is {value!r}; a number is needed.") from None
        if found is not None and not 0 < found <= 1:
            raise OptionError(f"--{name} is {value}; more than 0 and at most 1 is needed.")
        return found

    def switch(self, name: str) -> bool | None:
        """Whether ``--name`` or ``--no-name`` was given last; None if neither."""
        given = [word for word in self._values if word in (name, f"no-{name}")]
        if not given:
            return None
        if self.value(name) in ("False", "false"):  # from a config file
            return False
        return given[-1] == name

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON option, its dotted parts included, whose values are JSON or plain words.

        Raises OptionError where the text is no JSON object, or a part lies within a value.
        """
        found: dict[str, Any] = {}
        if (text := self.value(name)) is not None:
            found = _json_object(name, text)
        for given, values in self._values.items():
            if given.startswith(f"{name}.") and values[-1] is not None:
                *path, last = given.removeprefix(f"{name}.").split(".")
                place = found
                for word in path:
                    place = place.setdefault(word, {})
                    if not isinstance(place, dict):
                        raise OptionError(f"--{given}: {word!r} has a value already, {place!r}.")
                place[last] = _json_or_word(values[-1])
        return found

    def without(self, name: str) -> tuple[str, ...]:
        """All arguments but an option and its value."""
        kept: list[str] = []
        skip = False
        for argument in self.arguments:
            if skip:
                skip = False
                continue
            own, value = _split(argument)
            if own == name:
                skip = value is None
            else:
                kept.append(argument)
        return tuple(kept)


def _split(argument: str) -> tuple[str | None, str | None]:
    """The option's name as vLLM normalizes it, and the value after ``=``."""
    head, equals, value = argument.partition("=")
    if head in _SHORT:
        return _SHORT[head], value if equals else None
    if not head.startswith("--") or len(head) == 2:
        return None, None
    name, dot, parts = head[2:].partition(".")
    return name.replace("_", "-") + dot + parts, value if equals else None


def _json_or_word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--{name} is no JSON: {error}. Quote it for the shell.") from None
    if not isinstance(found, dict):
        raise OptionError(f"--{name} is {text}; a JSON object is needed.")
    return found


def _config_file(path: Path) -> dict[str, str]:
    yaml = import_module("yaml")  # comes with vLLM; has no types
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path}: {error}.") from None
    if not isinstance(found, dict):
        raise OptionError(f"--config {path} holds no mapping of options.")
    return {
        str(name): json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in found.items()
    }
