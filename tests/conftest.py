"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_they_are() -> Iterator[None]:
    """A test that configures logs (level, form) does so for itself alone."""
    yield
    structlog.reset_defaults()
