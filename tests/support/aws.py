"""A fake AWS for tests, served once in a process; each test gets an empty region of it."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from gpu_autoscaler.providers.aws.capacity import AwsCapacity
from gpu_autoscaler.providers.aws.options import AwsOptions

if TYPE_CHECKING:
    from gpu_autoscaler.simcloud.aws.fake import AwsFake

REGION = "eu-west-1"
TYPES = ("g4dn.xlarge", "g5.xlarge")


class TurnedClock:
    """A clock that only advances by hand; starts at a whole second, as EC2's timestamps have no fractions."""

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 21, 12, tzinfo=UTC)

    def now(self) -> datetime:
        """Where the test left it."""
        return self.at

    def turn(self, seconds: float) -> None:
        """Let that much time pass."""
        self.at += timedelta(seconds=seconds)


class Region:
    """A served region with a launch template `gpu`, and what a test needs to know of it."""

    def __init__(self, fake: "AwsFake", url: str, clock: TurnedClock) -> None:
        self.fake = fake
        self.url = url
        self.clock = clock
        self.subnets = fake.offer_template("gpu")

    def options(self, **changes: object) -> AwsOptions:
        """Settings that fit the region."""
        fitting = {"region": REGION, "launch_template": "gpu", "subnets": tuple(self.subnets), "instance_types": TYPES}
        return AwsOptions(**(fitting | changes))  # type: ignore[arg-type]

    def provider(self, installation: str, **changes: object) -> AwsCapacity:
        """A driver that buys here."""
        options = self.options(**changes)
        return AwsCapacity(options, installation=installation, url=self.url, call_seconds_max=60.0, now=self.clock.now)


def moto_or_skip() -> None:
    """Skip the test, by name, where the fake AWS cannot be had."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("boto3") is None:
        pytest.skip("NOT RUN: moto and boto3 are not installed; `make .venv/.dev` installs them (the fake AWS)")


@functools.cache
def share_service_models() -> None:
    """Let all sessions of this process share what boto3 reads of its service models: to parse EC2's anew takes each
    half a second of processor time."""
    import botocore.loaders  # noqa: PLC0415 - an extra, and slow to load
    import botocore.session  # noqa: PLC0415 - as the loaders

    botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)


@contextmanager
def served_region() -> Iterator[Region]:
    """Serve an empty region until the block ends."""
    moto_or_skip()
    share_service_models()
    from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - moto loads slowly
    from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - as the fake

    clock = TurnedClock()
    fake = AwsFake(REGION, now=clock.now)
    with serving(fake) as url:
        yield Region(fake, url, clock)
