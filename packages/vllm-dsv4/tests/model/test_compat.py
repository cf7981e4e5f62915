"""Versions, and constructors that are run with other classes."""

from __future__ import annotations

import pytest

from vllm_dsv4 import compat
from vllm_dsv4.errors import VersionError


class Inner:
    """Stands for vLLM's; named in constructors below."""


class Ours(Inner):
    """Stands for ours."""


class Outer:
    def __init__(self, count: int, *, spare: int = 1) -> None:
        super().__init__()
        self.items = [Inner() for _ in range(count)]
        self.make = lambda: Inner()
        self.spare = spare


class OuterWithOurs(Outer):
    __init__ = compat.with_names(Outer.__init__, Inner=Ours)


def test_a_constructor_runs_with_our_class_and_stays_itself() -> None:
    ours = OuterWithOurs(2)
    assert [type(item) for item in (*ours.items, ours.make())] == [Ours] * 3
    assert ours.spare == 1
    assert OuterWithOurs(1, spare=5).spare == 5
    assert [type(item) for item in Outer(1).items] == [Inner]
    assert Outer.__init__.__globals__["Inner"] is Inner


def test_a_name_that_is_not_used_means_another_vllm() -> None:
    with pytest.raises(VersionError, match="no longer uses Gone"):
        compat.with_names(Outer.__init__, Gone=Ours)
    with pytest.raises(VersionError, match="no plain function"):
        compat.with_names(Inner)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.5", "0.33.0+cu130", "0.33.1rc1"])
def test_the_tested_series(version: str) -> None:
    assert compat.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0", "1.33.0", "dev", "0.34.0rc1"])
def test_any_other_is_a_problem_in_one_sentence(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = compat.version_problem(version)
    assert problem is not None
    assert f"this is vLLM {version}: install 'vllm==0.33.*'" in problem
    monkeypatch.setattr(compat, "version", lambda package: version)
    with pytest.raises(VersionError, match="tested with vLLM 0.33.x"):
        compat.require_tested_version()
