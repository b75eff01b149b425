"""Control planes as fixtures. A test module imports the one that it needs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.controlplane.plane import ControlPlane, running_plane


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server with its etcd, for the module: nothing acts on its objects but the tests."""
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder)) as running:
        yield running
