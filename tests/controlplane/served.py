"""Real Kubernetes API for tests: the one of the environment, or a control plane on this machine.

If neither is available, tests that need one are skipped with the next step.
"""

import asyncio
import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.controlplane.plane import EVERYTHING, running_plane

from gpu_autoscaler.kube.connection import from_kubeconfig

# A kubeconfig of a cluster that tests may use as they like, with scheduler, controllers and KWOK.
ENVIRONMENT = "GPU_AUTOSCALER_CONTROLPLANE"


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes API and its credentials."""

    url: str
    token: str | None = None
    tls: ssl.SSLContext | None = None  # None: plain HTTP


@contextlib.contextmanager
def real_kubernetes() -> Iterator[Served]:
    """A real API server with scheduler, controllers and KWOK's nodes."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        yield asyncio.run(_of_kubeconfig(given))
        return
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder), EVERYTHING) as plane:
        yield Served(url=plane.url, token=plane.admin_token, tls=plane.tls)


async def _of_kubeconfig(path: str) -> Served:
    connection = from_kubeconfig(path)
    header = await connection.credentials.header()
    token = None if header is None else header.removeprefix("Bearer ")
    return Served(url=connection.base_url, token=token, tls=connection.tls)
