"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog
from tests.support.claims import Plugin


def pytest_configure(config: pytest.Config) -> None:
    """What tests claim of clouds is held against what they do (`tests/support/claims.py`)."""
    config.pluginmanager.register(Plugin(config), "claims")


@pytest.fixture(autouse=True)
def logs_as_they_are() -> Iterator[None]:
    """A test that configures logs (level, form) does so for itself alone."""
    yield
    structlog.reset_defaults()
