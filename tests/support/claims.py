"""Verify that a marked test makes the cloud calls of its mark; `docs/clouds.md` is generated from these marks.

A pytest plugin. Every fake cloud reports its requests here while a marked test runs. A mark on a class or module covers
all its tests, and is checked after the last of them. All of them must have passed in this process, so a partial run
(`-k`, a single test, several workers) checks nothing.
"""

import importlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

_FAKES = {
    "aws": ("gpu_autoscaler.simcloud.aws.fake", "AwsFake"),
    "azure": ("gpu_autoscaler.simcloud.rest", "RestFake"),
    "gcp": ("gpu_autoscaler.simcloud.rest", "RestFake"),
}


class _Told(deque[Any]):
    """Requests of a fake, also passed to its listeners."""

    def __init__(self, asked: deque[Any], heard: set[str]) -> None:
        super().__init__(asked, asked.maxlen)
        self._heard = heard

    def append(self, call: Any) -> None:  # noqa: ANN401 - each fake has a call of its own
        """As a deque does."""
        self._heard.add(call.name)
        super().append(call)


class Claims:
    """What the marks of this run claim, and what was asked of the fakes so far."""

    def __init__(self) -> None:
        self._heard: set[str] = set()  # by the test that runs
        self._made: dict[str, set[str]] = {}  # by whoever carries a mark
        self._left: dict[str, set[str]] = {}  # tests that have not passed yet
        self._listening: set[str] = set()

    def expect(self, items: Iterable[pytest.Item]) -> None:
        """Wait for these tests."""
        for item in items:
            for owner, _, _ in claims_of(item):
                self._left.setdefault(owner, set()).add(item.nodeid)

    def begin(self, item: pytest.Item) -> None:
        """Listen, from now on to what this test asks of a fake."""
        self._heard.clear()
        for _, cloud, _ in claims_of(item):
            self._listen(cloud)

    def passed(self, item: pytest.Item) -> None:
        """Take note of what it has asked."""
        for owner, _, _ in claims_of(item):
            self._made.setdefault(owner, set()).update(self._heard)
            self._left.get(owner, set()).discard(item.nodeid)

    def broken(self, item: pytest.Item) -> list[str]:
        """Return the claimed but uncalled methods of this test's mark, once all tests of the mark are over."""
        return [
            f"{owner} is marked with the call {name} of {cloud}, which nobody made; correct the mark, or the test"
            for owner, cloud, calls in claims_of(item)
            if not self._left.get(owner, {""})
            for name in sorted(calls - self._made[owner])
        ]

    def _listen(self, cloud: str) -> None:
        module, name = _FAKES[cloud]
        if name in self._listening:
            return
        self._listening.add(name)
        fake, heard = getattr(importlib.import_module(module), name), self._heard
        made = fake.__init__

        def begun(self: Any, *args: Any, **more: Any) -> None:  # noqa: ANN401 - whatever it takes
            made(self, *args, **more)
            self.asked = _Told(self.asked, heard)

        fake.__init__ = begun


def claims_of(item: pytest.Item) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield who carries a mark with calls, of which cloud, and which calls."""
    for node, mark in item.iter_markers_with_node("cloud"):
        calls = frozenset(mark.kwargs.get("calls", ()))
        if calls and mark.args[0] in _FAKES:
            yield f"{node.nodeid.partition('[')[0]} {sorted(calls)}", mark.args[0], calls


class Plugin:
    """Where pytest asks."""

    def __init__(self, config: pytest.Config) -> None:
        self._claims = Claims()
        chosen = config.option.keyword or config.option.markexpr or any("::" in one for one in config.args)
        self._is_whole = not chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All tests of this run are known."""
        self._claims.expect(session.items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """What is left out of a run never passes, and so nothing is held against what it shares a mark with."""
        self._claims.expect(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before its fixtures make a fake."""
        if any(claims_of(item)):
            self._claims.begin(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Passed, if nothing is raised."""
        yield
        self._claims.passed(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """After the last test of a mark."""
        yield
        if self._is_whole and (broken := self._claims.broken(item)):
            pytest.fail("\n".join(broken), pytrace=False)
