"""Settings over REST and from the command line."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from tests.support.front import front
from tests.support.stories import policy

from gpu_autoscaler.runtime.config import GatewaySettings, NatsSettings, Settings
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


async def test_settings_and_policy_are_shown_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens, and passwords in addresses, are hidden; the policy is the one in force."""
    async with front(tmp_path, policy=policy(queue_count_max=7)) as gate:
        gate.model.settings = Settings(
            nats=NatsSettings(url="nats://ada:lovelace@broker:4222"), gateway=GatewaySettings(tokens=("s3cret", "b"))
        )
        async with aiohttp.ClientSession() as http, http.get(f"{gate.url}/api/v1/settings") as response:
            document = await response.json()
        assert await asyncio.to_thread(run, ["settings", "--gateway", gate.url]) == Exit.OK
    values = {item["key"]: item["value"] for item in document["items"] if not item["is_default"]}
    assert values == {"nats.url": "nats://(hidden)@broker:4222", "gateway.tokens": ["(hidden)", "(hidden)"]}
    assert document["policy"]["queue_count_max"] == 7
    shown = capsys.readouterr().out
    assert "nats.url" in shown
    assert "lovelace" not in shown + str(document)
    assert "s3cret" not in shown + str(document)
