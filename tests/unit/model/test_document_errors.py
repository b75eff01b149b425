"""Errors of a document: all of a small one, the first of one with any number, in a limited time."""

import time
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from gpu_autoscaler.model.document_errors import ERRORS_COUNT_MAX, all_errors, first_errors, validation_errors
from gpu_autoscaler.model.jobs import JobState


class Part(msgspec.Struct):
    """An item of the list."""

    size: int


class Whole(msgspec.Struct):
    """A document with a list of limited length."""

    name: str
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=3)] = ()


def test_every_error_of_a_small_document_is_named() -> None:
    """Unknown, mistyped and missing keys, in items of lists too."""
    assert list(validation_errors({"parts": [{"size": "a"}, {"size": 1, "sizes": 2}, {}]}, Whole)) == [
        "name: missing; add it",
        "parts[0].size: Expected `int`, got `str`; correct the value",
        "parts[1].sizes: unknown key 'sizes'; did you mean 'size'?",
        "parts[2].size: missing; add it",
    ]


class Filter(msgspec.Struct):
    """A document with a fixed set of values, and an instant."""

    states: tuple[JobState, ...] | None = None
    unit: Literal["nodes", "gpus"] = "nodes"
    after: datetime | None = None


def test_an_error_of_a_fixed_set_lists_what_is_valid() -> None:
    """Of an enum in a list and of a literal; a date has an example."""
    states = ", ".join(state.value for state in JobState)
    assert list(validation_errors({"states": ["dreaming"], "unit": "racks", "after": "yesterday"}, Filter)) == [
        f"states: Invalid enum value 'dreaming' - at `$[0]`; use one of {states}",
        "unit: Invalid enum value 'racks'; use one of nodes, gpus",
        "after: Invalid RFC3339 encoded datetime; example: 2026-11-21T08:00:00Z",
    ]


def test_a_document_with_a_million_errors_takes_no_longer() -> None:
    """A service that reads it does nothing else meanwhile: 8 s of processor time for 150,000 keys before."""
    keys = {f"k{number}": 1 for number in range(150_000)}
    started = time.process_time()
    assert len(first_errors(keys, Whole)) == ERRORS_COUNT_MAX + 1
    text = all_errors(msgspec.json.encode(keys), Whole, ValueError())
    assert first_errors({"name": "a", "parts": [keys] * 1_000}, Whole) == [
        "parts: Expected `array` of length <= 3; correct the value"
    ]
    assert time.process_time() - started < 4.0
    assert text.endswith("; more are not listed")
    assert text.count("unknown key") == ERRORS_COUNT_MAX
