"""Fixtures and plugins of all tests."""

import gc
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import structlog
from tests.support.claims import Plugin

# jsonschema builds 38 grammars for a format that no schema here has, as long as it finds this package: 4 s of processor
# time in each worker.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Compare the cloud calls that tests declare with those they make (`tests/support/claims.py`); time no example."""
    config.pluginmanager.register(Plugin(config), "claims")
    # A busy machine is no defect of the code; how long something takes is measured by `make bench`.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections: they stay until the end, and are most objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    """Undo the log configuration of a test after it."""
    yield
    structlog.reset_defaults()
