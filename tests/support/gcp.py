"""A fake Google Cloud for tests: a project of its own for each, with a group for each offer."""

import importlib.util
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.aws import TurnedClock

from gpu_autoscaler.providers.gcp.capacity import GcpCapacity
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.simcloud.rest import serving_rest

if TYPE_CHECKING:
    from gpu_autoscaler.simcloud.gcp.fake import GcpFake

TYPES = ("g2-standard-4", "n1-standard-4")


class Project:
    """A served project with groups, and what a test needs to know of it."""

    def __init__(self, fake: "GcpFake", url: str, clock: TurnedClock, groups: list[str]) -> None:
        self.fake = fake
        self.url = url
        self.clock = clock
        self.groups = groups
        self.call_seconds_max = 60.0

    def options(self, **changes: object) -> GcpOptions:
        """Settings that fit the project."""
        fitting: Mapping[str, object] = {"project": "fake-project", "groups": tuple(self.groups)}
        return GcpOptions(**{**fitting, **changes})  # type: ignore[arg-type]

    def provider(self, installation: str, **changes: object) -> GcpCapacity:
        """A driver that buys here."""
        return GcpCapacity(
            self.options(**changes),
            installation=installation,
            url=self.url,
            call_seconds_max=self.call_seconds_max,
            now=self.clock.now,
        )


def discovery_or_skip() -> None:
    """Skip the test, by name, where the fake of Google Cloud cannot be had."""
    if importlib.util.find_spec("googleapiclient") is None:
        pytest.skip("NOT RUN: google-api-python-client is not installed; `make .venv/.dev` installs it (the fake GCP)")


@asynccontextmanager
async def served_project(types: tuple[str, ...] = TYPES) -> AsyncIterator[Project]:
    """Serve a project until the block ends."""
    discovery_or_skip()
    from gpu_autoscaler.simcloud.gcp.fake import GcpFake  # noqa: PLC0415 - needs googleapiclient

    clock = TurnedClock()
    fake = GcpFake(now=clock.now)
    groups = fake.offer_everything(types)
    async with serving_rest(fake) as url:
        yield Project(fake, url, clock, groups)
