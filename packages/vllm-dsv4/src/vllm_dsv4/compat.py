"""The only file that names vLLM versions, and how its constructors are run with our classes.

It imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import Any, Final

from .errors import VersionError

#: The series of vLLM that the tests run with.
TESTED: Final = (0, 33)


def version_problem(installed: str | None = None) -> str | None:
    """One sentence if vLLM is outside the tested range; ``installed`` None asks its package."""
    installed = version("vllm") if installed is None else installed
    numbers = installed.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) == TESTED:
        return None
    series = ".".join(map(str, TESTED))
    return (
        f"vllm-dsv4 is tested with vLLM {series}.x and this is vLLM {installed}: install "
        f"'vllm=={series}.*', or the vllm-dsv4 that goes with {installed}."
    )


def require_tested_version() -> None:
    """Raises VersionError outside the tested range."""
    if problem := version_problem():
        raise VersionError(problem)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """vLLM's ``function`` as a function of its own, in which some global names mean our classes.

    vLLM's model classes name each other in their constructors, so a subclass of the innermost
    cannot be slipped in by inheritance, and their modules' globals are shared with every other
    model. The copy has globals of its own; vLLM's function and module stay what they are.

    Raises VersionError if the function does not use one of the names: another vLLM.
    """
    if not isinstance(function, FunctionType):
        raise VersionError(f"{function!r} of vLLM is no plain function: an untested vLLM?")
    unused = set(names) - set(_global_names(function.__code__))
    if unused:
        raise VersionError(
            f"{function.__module__}.{function.__qualname__} of vLLM {version('vllm')} no longer "
            f"uses {', '.join(sorted(unused))}. {version_problem() or 'Reinstall vLLM.'}"
        )
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a lambda or a comprehension within
            yield from _global_names(constant)
