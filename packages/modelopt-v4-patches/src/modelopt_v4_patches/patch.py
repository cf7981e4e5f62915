"""One patch: what it replaces and why, which sources it knows, and whether it took.

modelopt imports functions by name, so a patch of the defining module alone changes nothing. A patch
therefore replaces its target in every module that holds it; a module imported later finds the
replacement already. Only names are replaced, nothing on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal, TypeAlias

from .errors import PatchError

State: TypeAlias = Literal[
    "needed", "applied", "fixed upstream", "unknown version", "not installed", "not loaded"
]
Function: TypeAlias = Callable[..., Any]

_MARK = "_dsv4_patch"  # on a replacement: itself, which functools.wraps copies to wrappers


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A function or method of another package, and what stands in for it.

    package: the distribution, for its version. module, target: where it is, "Class.method" or
    "function". versions: the tested range. sources: every known text of the target, as
    `source_hash` gives it, and the versions that have it; another text is an unknown version.
    parameters: the leading ones that the replacement relies on. upstream: where upstream stands,
    and when the patch can go. wrap: makes the replacement from the original. probe: asks whatever
    is installed now, by its behaviour, for what the patch brings; True without the patch means
    fixed upstream, False with it means that it did not take.
    """

    name: str
    package: str
    module: str
    target: str
    versions: str
    sources: Mapping[str, str]
    parameters: tuple[str, ...]
    reason: str
    upstream: str
    wrap: Callable[[Function], Function]
    probe: Callable[[], bool]

    def version(self) -> str | None:
        """The installed version of the package; None without it."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def state(self) -> State:
        """Where the patch stands in this process; imports the package."""
        if self.version() is None:
            return "not installed"
        if self.load() is None:
            return "not loaded" if self.unknown_version() is None else "unknown version"
        if self.applied():
            return "applied"
        if self.unknown_version() is not None:
            return "unknown version"
        return "needed" if self.needed() else "fixed upstream"

    def needed(self) -> bool:
        """Whether what the patch brings is not there, as things are in this process."""
        try:
            return not self._ask()
        except (RuntimeError, AssertionError, TypeError, AttributeError):
            return True

    def fixed_upstream(self) -> bool:
        """Whether upstream brings it by itself."""
        return self.state() == "fixed upstream"

    def unknown_version(self) -> str | None:
        """One sentence on why the patch does not know what is installed; None if it does."""
        from packaging.specifiers import SpecifierSet

        found = self.version()
        if found is None or not SpecifierSet(self.versions).contains(found, prereleases=True):
            return f"{self.package} {found or 'is missing; it'} is outside {self.versions}"
        try:
            self._owner()
        except (ImportError, AttributeError) as error:
            return f"{self.package} {found}: {self.module} cannot be used ({error})"
        if (function := self.load()) is None:
            return f"{self.package} {found} has no {self.module}.{self.target}"
        if (digest := source_hash(original(function))) not in self.sources:
            return (
                f"{self.target} of {self.package} {found} has a source that this patch was never "
                f"tested with (SHA-256 {digest})"
            )
        return None

    def apply(self, *, allow_unknown: bool = False) -> None:
        """Replaces the target wherever it is held; does nothing if it is applied or not needed.

        Raises PatchError if what is installed is unknown and that was not allowed, if the target
        takes other parameters, or if the patch does not take; then nothing is replaced.
        """
        function = self.load()
        if function is None:
            if not allow_unknown and (unknown := self.unknown_version()) is not None:
                raise PatchError(f"patch {self.name}: {unknown}")
            return
        if _ours(function) is None and not self._wanted(function, allow_unknown):
            return
        ours: Any = _ours(function) or self._replacement(function)
        self._install(ours.__wrapped__, ours)  # also where an earlier apply could not see it
        try:
            self.check()
        except PatchError:
            self.revert()
            raise

    def revert(self) -> None:
        """Puts the original back wherever the replacement is held."""
        function = self.load()
        if function is None or (ours := _ours(function)) is None:
            return
        if function is not ours:
            raise PatchError(
                f"patch {self.name}: something else wraps {self.target} now; revert that first"
            )
        self._install(ours, ours.__wrapped__)

    def applied(self) -> bool:
        """Whether the target in this process is ours, or wraps ours."""
        function = self.load()
        return function is not None and _ours(function) is not None

    def check(self) -> None:
        """Proves that the patch took: no module holds the original, and the probe succeeds.

        Raises PatchError naming the modules that still hold it, or what the probe met.
        """
        function = self.load()
        if function is None or (ours := _ours(function)) is None:
            raise PatchError(f"patch {self.name}: {self.target} is not patched")
        if left := [
            f"{module.__name__}.{name}" for module, name in self._holders(ours.__wrapped__)
        ]:
            raise PatchError(f"patch {self.name}: still unpatched: {', '.join(sorted(left))}")
        try:
            took = self._ask()
        except Exception as error:
            raise PatchError(f"patch {self.name}: {self.target} fails: {error}") from error
        if not took:
            raise PatchError(f"patch {self.name}: {self.target} behaves as without it")

    def load(self) -> Any:
        """The function behind the target as it is now; None if there is none."""
        try:
            owner, name = self._owner()
        except (ImportError, AttributeError):
            return None
        found = vars(owner).get(name)
        return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found

    def _ask(self) -> bool:
        import torch

        # Whatever default device the script has set; warnings are about what the probe made up.
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            return self.probe()

    def _owner(self) -> tuple[Any, str]:
        owner: Any = importlib.import_module(self.module)
        *path, name = self.target.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name

    def _wanted(self, function: Any, allow_unknown: bool) -> bool:
        if (unknown := self.unknown_version()) is not None:
            if not allow_unknown:
                raise PatchError(f"patch {self.name}: {unknown}")
            parameters = tuple(inspect.signature(function).parameters)
            if parameters[: len(self.parameters)] != self.parameters:
                raise PatchError(
                    f"patch {self.name}: {self.target} takes {', '.join(parameters)}; "
                    f"expected {', '.join(self.parameters)}"
                )
        return self.needed()

    def _replacement(self, function: Function) -> Function:
        replacement = wraps(function)(self.wrap(function))
        setattr(replacement, _MARK, replacement)
        return replacement

    def _install(self, old: Function, new: Function) -> None:
        owner, name = self._owner()
        for module, held in self._holders(old):
            setattr(module, held, new)
        if not isinstance(owner, ModuleType):
            found = vars(owner)[name]
            bound = isinstance(found, (classmethod, staticmethod))
            setattr(owner, name, type(found)(new) if bound else new)

    def _holders(self, function: Function) -> Iterator[tuple[ModuleType, str]]:
        """Every module that holds a function, with its names there; none holds a method."""
        if "." in self.target:
            return
        for module in list(sys.modules.values()):
            for name, held in list((getattr(module, "__dict__", None) or {}).items()):
                if held is function:
                    yield module, name


def source_hash(function: Function) -> str:
    """The start of the SHA-256 of a function's source text, dedented; "" if it has no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except OSError:
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def original(function: Any) -> Any:
    """The function below the replacement, if there is one."""
    ours = _ours(function)
    return function if ours is None else ours.__wrapped__


def _ours(function: Any) -> Any:
    """The replacement, also from within a wrapper made with functools.wraps; None without one."""
    return getattr(function, _MARK, None)
