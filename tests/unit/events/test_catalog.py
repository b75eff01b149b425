"""Encoding and decoding of facts: valid, invalid and old versions."""

from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
import pytest

from gpu_autoscaler.events.catalog import FACT_CATALOG, FACTS, FactCatalog, Upcast
from gpu_autoscaler.events.envelope import Envelope, encode
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import InvalidFact, UnknownType

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class LampLit(Fact, frozen=True, kw_only=True):
    """A lamp was lit, at this brightness; version 1 called it `percent`."""

    VERSION: ClassVar[int] = 2

    brightness_ratio: float
    color: str = "white"


def _lift(old: dict[str, Any]) -> dict[str, Any]:
    return {"brightness_ratio": old["percent"] / 100}


LAMPS = FactCatalog([LampLit], {"lamp.lit.v1": Upcast("lamp.lit.v1", "lamp.lit.v2", _lift)})


def event(**changes: Any) -> bytes:  # noqa: ANN401 - any JSON
    """A CloudEvent about a lamp, changed."""
    head = {"specversion": "1.0", "id": "1", "source": "/t", "type": "lamp.lit.v2", "time": NOON.isoformat()}
    return msgspec.json.encode(head | {"data": {"brightness_ratio": 0.5}} | changes)


@pytest.mark.parametrize("envelope", list(examples()), ids=lambda envelope: envelope.type)
def test_every_fact_survives_encoding(envelope: Envelope) -> None:
    """Decoding returns what was encoded."""
    assert FACT_CATALOG.decode(encode(envelope)) == envelope


def test_there_is_an_example_of_every_fact() -> None:
    """Each fact of the catalog has one example."""
    assert sorted(envelope.type for envelope in examples()) == sorted(fact.type_name() for fact in FACTS)


def test_an_unknown_field_is_ignored() -> None:
    """A newer publisher may send fields that we do not know."""
    fact = LAMPS.decode(event(data={"brightness_ratio": 0.5, "warmth_kelvin": 2700})).fact
    assert fact == LampLit(brightness_ratio=0.5)


def test_a_new_field_has_a_default() -> None:
    """An older publisher does not know the field `color`."""
    fact = LAMPS.decode(event()).fact
    assert isinstance(fact, LampLit)
    assert fact.color == "white"


def test_an_unknown_type_is_distinct_from_an_invalid_fact() -> None:
    """The first is a fact of a newer version, the second is broken."""
    with pytest.raises(UnknownType, match=r"lamp\.dimmed\.v1"):
        LAMPS.decode(event(type="lamp.dimmed.v1"))
    with pytest.raises(InvalidFact, match="brightness_ratio") as caught:
        LAMPS.decode(event(data={"brightness_ratio": "half"}))
    assert not isinstance(caught.value, UnknownType)


def test_an_old_version_is_converted() -> None:
    """What was stored as version 1 reads as version 2."""
    fact = LAMPS.decode(event(type="lamp.lit.v1", data={"percent": 25})).fact
    assert fact == LampLit(brightness_ratio=0.25)


def test_an_old_version_that_cannot_be_converted_is_invalid() -> None:
    """The message names the failed conversion."""
    with pytest.raises(InvalidFact, match=r"lamp\.lit\.v1"):
        LAMPS.decode(event(type="lamp.lit.v1", data={"watts": 25}))


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (b"not json", "CloudEvent"),
        (b"[]", "CloudEvent"),
        (b"\xff\xfe", "CloudEvent"),
        (b'{"type": "lamp.lit.v2"}', "id"),
        (event(id=""), "id"),
        (event(specversion="0.3"), "specversion"),
        (event(time="yesterday"), "CloudEvent"),
    ],
)
def test_a_message_that_is_not_a_cloud_event_is_rejected(message: bytes, word: str) -> None:
    """The reason names what is wrong."""
    with pytest.raises(InvalidFact, match=word):
        LAMPS.decode(message)


def test_a_missing_time_is_the_arrival_time() -> None:
    """CloudEvents makes `time` optional."""
    without = msgspec.json.encode(
        {"specversion": "1.0", "id": "1", "source": "/t", "type": "lamp.lit.v2", "data": {"brightness_ratio": 1}}
    )
    assert LAMPS.decode(without, arrived_at=lambda: NOON).time == NOON
    with pytest.raises(InvalidFact, match="time"):
        LAMPS.decode(without)


def test_a_naive_time_is_rejected() -> None:
    """A time without a zone is ambiguous."""
    with pytest.raises(InvalidFact):
        LAMPS.decode(event(time="2026-11-21T12:00:00"))


def test_equal_conditions_have_equal_ids() -> None:
    """Whatever the publisher and the time."""
    first, second = list(examples()), list(examples())
    assert [one.id for one in first] == [two.id for two in second]
    assert all(one.id for one in first)
    assert len({one.id for one in first}) == len(first)
