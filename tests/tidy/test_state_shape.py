"""A snapshot of the last release can be decoded: its shape is frozen."""

import msgspec
import pytest
from tests.tidy.state_shape import RECORDED, from_text, shape, to_text, violations

from gpu_autoscaler.runtime.snapshot_codec import FORMAT_VERSION


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A record of the state."""

    name: str
    at: int | None = None


class State(msgspec.Struct, frozen=True):
    """A state as it was."""

    parts: dict[str, Part] = {}
    pair: tuple[str, int] = ("", 0)


class Wider(msgspec.Struct, frozen=True):
    """The same with one more field and one more choice."""

    parts: dict[str, Part] = {}
    pair: tuple[str, int | str] = ("", 0)
    names: tuple[str, ...] = ()


class Narrower(msgspec.Struct, frozen=True, kw_only=True):
    """The same without a field, with fewer choices, and a field without a default."""

    parts: dict[str, int] = {}
    newest: int


def test_the_state_has_the_recorded_shape() -> None:
    """Or one that decodes it: `python -m tests.tidy.state_shape` records an added field, and refuses what is broken."""
    version, recorded = from_text(RECORDED.read_text(encoding="utf-8"))
    if version == FORMAT_VERSION:
        assert violations(recorded, shape()) == [], "see tests/tidy/state_shape.py"
    assert RECORDED.read_text(encoding="utf-8") == to_text(shape()), "run `python -m tests.tidy.state_shape`"


@pytest.mark.parametrize(
    ("current", "broken"),
    [
        (State, []),
        (Wider, []),
        (
            Narrower,
            [
                "State.pair is gone: its content would be lost",
                "State.pair<0> is gone: its content would be lost",
                "State.pair<1> is gone: its content would be lost",
                "State.parts<value> can no longer be Part",
                "State.newest has no default",
                "Part is gone: its content would be lost",
            ],
        ),
    ],
)
def test_only_what_cannot_be_decoded_is_a_violation(current: type, broken: list[str]) -> None:
    """Added fields with defaults and added choices can be."""

    def named(root: type) -> dict[str, frozenset[str]]:
        return dict(from_text(to_text(shape(root)).replace(root.__name__, "State"))[1])

    assert {each for each in violations(named(State), named(current)) if "Part." not in each} == set(broken)


def test_the_shape_reaches_into_the_facts() -> None:
    """The state keeps observed pods, whose fields are part of it; and all choices of a field."""
    _, recorded = from_text(to_text(shape()))
    assert "ClusterState.pods<value>" in recorded
    assert len([path for path in recorded if path.startswith("PodObserved.")]) > 20
    assert len(recorded["DrainNode.reason"]) > 10
