"""Clients outside a running system: programs, the command line, NATS, HTTP."""

import asyncio
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from nats.aio.client import Client
from tests.support.running import POLICY, Running

from gpu_autoscaler.runtime.clock import CLOCK_ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAM_SECONDS_MAX = 120.0  # some wait a minute themselves


class Said(msgspec.Struct, frozen=True):
    """Output and exit code of a program."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - any JSON
        """Its data."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """Its data line by line."""
        return self.out.splitlines()


async def program(*command: str, environment: Mapping[str, str] | None = None) -> Said:
    """Run a program to its end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PROGRAM_SECONDS_MAX)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Said(process.returncode, out.decode(), err.decode())


async def example(cluster: Running, name: str, *arguments: str) -> Said:
    """Run one of the programs that the documentation shows to users."""
    return await program(sys.executable, str(EXAMPLES / name), "--nats", cluster.system.nats_url, *arguments)


async def cli(cluster: Running, *tokens: str) -> Said:
    """Run one command line, with the addresses, the clock and the policy of this system."""
    environment = {
        "GPU_AUTOSCALER_GATEWAY": cluster.system.gateway_url,
        "GPU_AUTOSCALER_NATS_URL": cluster.system.nats_url,
        "GPU_AUTOSCALER_POLICY_PATH": str(POLICY),
        CLOCK_ENVIRONMENT: cluster.clock.to_text(),
    }
    return await program(sys.executable, "-m", "gpu_autoscaler_services.cli.main", *tokens, environment=environment)


async def publish(cluster: Running, subject: str, payload: bytes, message_id: str | None = None) -> None:
    """Publish bytes from a connection of their own. Raises what nats-py raises."""
    client = Client()
    await client.connect(cluster.system.nats_url)
    try:
        headers = None if message_id is None else {"Nats-Msg-Id": message_id}
        await client.jetstream().publish(subject, payload, headers=headers)
    finally:
        await client.close()


class Answer(msgspec.Struct, frozen=True):
    """What the gateway answered."""

    status: int
    content_type: str
    body: Any


async def ask(
    cluster: Running, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request to the gateway."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.request(
            method, cluster.system.gateway_url + path, data=None if body is None else io.BytesIO(body), headers=sent
        ) as answer,
    ):
        return Answer(answer.status, answer.content_type, json.loads(await answer.read()))


async def until_answered(cluster: Running, path: str, seconds_max: float = 60.0) -> Answer:
    """Ask until the gateway answers 200: one that was just started does not listen yet. Raises TimeoutError."""
    async with asyncio.timeout(seconds_max):
        while True:
            try:
                answer = await ask(cluster, "GET", path)
            except aiohttp.ClientError:
                answer = None
            if answer is not None and answer.status == 200:
                return answer
            await asyncio.sleep(0.2)


def request_body(name: str = "train", **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """A request as users write it, for one T4 and a minute of cluster time, with changes."""
    return {
        "job_name": name,
        "project_id": "outside",
        "gpu_requirements": {"gpu_count": 1, "gpu_type": "T4"},
        "container": {"image": "registry.example/outside:1"},
        "resources": {"cpu": "1", "memory": "2Gi", "ephemeral_storage": "1Gi"},
        "run_seconds": 60,
        **changes,
    }


def event(event_id: str, data: object, **changes: object) -> bytes:
    """A CloudEvent of type `job.requested.v1` around the data, with changes; None leaves an attribute out."""
    attributes = {"specversion": "1.0", "id": event_id, "source": "/outside", "type": "job.requested.v1", "data": data}
    return json.dumps({key: value for key, value in {**attributes, **changes}.items() if value is not None}).encode()
