"""What controllers under test have in common: definitions that are served, certificates, a process that is ready."""

import base64
import contextlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

_READY_SECONDS_MAX = 60.0


def needed_program(recipe: Recipe) -> Path:
    """Return the only program of the recipe. Skips the test if it is not built."""
    (name,) = recipe.programs
    program = recipe.folder() / name
    if not program.is_file():
        pytest.skip(f"{recipe.words} cannot run: {recipe.missing() or 'not built yet'}; `make controlplane`")
    return program


def define(plane: ControlPlane, files: Iterable[Path], is_served: Callable[[], bool]) -> None:
    """Apply the definitions, and wait until their kinds are served."""
    paths = [str(path) for path in files]
    for path in paths:
        plane.kubectl("apply", "--server-side", "-f", path)
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while not is_served():
        assert time.monotonic() < deadline, f"these kinds were defined and are not served: {paths}"
        time.sleep(0.1)


def are_served(plane: ControlPlane, paths: Iterable[str]) -> bool:
    """True if the API server has all these paths."""
    return all(plane.ask(path)[0] == 200 for path in paths)


def give_certificates(plane: ControlPlane, folder: Path) -> Path:
    """Copy the plane's certificate to where a webhook server reads its own, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(plane.authority.server_certificate, folder / "tls.crt")
    shutil.copyfile(plane.authority.server_key, folder / "tls.key")
    return folder


def webhook_client(plane: ControlPlane, port: int, path: str) -> dict[str, Any]:
    """The `clientConfig` of a webhook: an address of this machine instead of a Service."""
    authority = base64.b64encode(plane.authority.certificate.read_bytes()).decode()
    return {"url": f"https://{LOOPBACK}:{port}{path}", "caBundle": authority}


@contextlib.contextmanager
def running_program(
    plane: ControlPlane,
    recipe: Recipe,
    command: Sequence[str],
    *,
    health_port: int | None = None,  # None: ready at once
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run the program beside the plane until the end of the block; it must not end before."""
    known = {"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder), **(environment or {})}
    with (plane.folder / "logs" / f"{recipe.name}.log").open("ab") as log:
        process = subprocess.Popen([str(needed_program(recipe)), *command], env=known, stdout=log, stderr=log)
    deadline = time.monotonic() + _READY_SECONDS_MAX
    try:
        while health_port is not None and not _is_ready(health_port):
            assert process.poll() is None, f"{recipe.words} ended:\n{plane.log_end(recipe.name)}"
            assert time.monotonic() < deadline, f"{recipe.words} is not ready:\n{plane.log_end(recipe.name)}"
            time.sleep(0.1)
        yield
        assert process.poll() is None, f"{recipe.words} ended:\n{plane.log_end(recipe.name)}"
    finally:
        process.kill()
        process.wait()


def build(recipe: Recipe) -> None:
    """Build the program, or end this process with the reason why it cannot be built."""
    reason = recipe.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{recipe.build()}\n")


def _is_ready(health_port: int) -> bool:
    with (
        contextlib.suppress(OSError, urllib.error.URLError),
        urllib.request.urlopen(f"http://{LOOPBACK}:{health_port}/readyz", timeout=2) as answer,
    ):
        return bool(answer.status == 200)
    return False
