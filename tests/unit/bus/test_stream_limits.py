"""Sizes and ages of streams in settings: short to write, and an error names the stream and the next step."""

import pytest

from gpu_autoscaler.bus.stream_limits import stream_limits
from gpu_autoscaler.bus.streams import DAY_SECONDS, MEBIBYTE, STREAMS, StreamLimits, streams

_NODE = next(spec for spec in STREAMS if spec.name == "NODE")


@pytest.mark.parametrize(
    ("text", "bytes_max", "age_seconds"),
    [
        ("NODE=1GiB/14d", 1024 * MEBIBYTE, 14 * DAY_SECONDS),
        ("NODE=12h/64MiB", 64 * MEBIBYTE, 12 * 3600),
        ("NODE=3GiB", 3072 * MEBIBYTE, _NODE.max_age_seconds),
        (" NODE=10min ", _NODE.max_bytes, 600),
    ],
)
def test_a_size_an_age_or_both(text: str, bytes_max: int, age_seconds: int) -> None:
    """What is not given stays as declared, and so do the other streams."""
    limits = stream_limits([text])
    assert limits == {"NODE": StreamLimits(max_age_seconds=age_seconds, max_bytes=bytes_max)}
    changed = [spec for spec, declared in zip(streams(limits), STREAMS, strict=True) if spec != declared]
    assert [(spec.name, spec.max_bytes, spec.max_age_seconds) for spec in changed] == [("NODE", bytes_max, age_seconds)]


def test_without_limits_the_declared_ones_hold() -> None:
    """An empty setting changes nothing."""
    assert streams(stream_limits(())) == STREAMS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NODES=1GiB", "'NODES=1GiB' names no stream; known: JOB, POD, NODE, "),
        ("NODE", "NODE: '' is no size and age; write NAME=SIZE/AGE"),
        ("NODE=1GB", "NODE: '1GB' is no size and age"),
        ("NODE=0MiB", "NODE: '0MiB' is no size and age"),
        ("NODE=1GiB/2GiB", "NODE: '1GiB/2GiB' has two of one kind"),
        ("NODE=15MiB", "NODE: '15MiB' is too small for its largest messages; set at least 16MiB"),
        ("NODE=9min", "NODE: '9min' is too short to publish again what is alive; set at least 10min"),
    ],
)
def test_a_wrong_limit_names_the_stream_and_the_next_step(text: str, message: str) -> None:
    """Whoever reads the error can correct it without looking anything up."""
    with pytest.raises(ValueError, match=r"NODE|GPU") as raised:
        stream_limits([text])
    assert str(raised.value).startswith(message)


def test_all_wrong_limits_are_named_at_once() -> None:
    """A stream that is set twice is one of them."""
    with pytest.raises(ValueError, match=r"NODE|GPU") as raised:
        stream_limits(["GPU=1d", "GPU=2d", "GPUS=3d"])
    twice, unknown = str(raised.value).split("\n")
    assert twice == "GPU is set twice; keep one of them"
    assert unknown.startswith("'GPUS=3d' names no stream")
