"""The whole system with a broker user per service, as the local system always runs."""

import asyncio
import json
import sys
from pathlib import Path

import nats
import pytest
from tests.e2e.test_story import QUIET_SECONDS_MAX, has, kept
from tests.support.outside import EXAMPLES, program
from tests.support.running import running

from gpu_autoscaler.events.job import JobStarted
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler_services.permissions import CLIENT, READER

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

SCHEMAS = Path(__file__).resolve().parents[2] / "schemas" / "facts"
BODY = {
    "job_name": "asked-by-a-client",
    "project_id": "e2e",
    "gpu_requirements": {"gpu_type": "T4", "gpu_count": 1},
    "container": {"image": "registry.example/e2e:1"},
    "run_seconds": 60.0,
}


async def test_a_job_runs_from_request_to_bill_under_users_of_the_broker(tmp_path: Path) -> None:
    """A program with the client's password submits, one with the reader's password follows.

    That no service was refused anything is held by `started`, in every test of the whole system.
    """
    request = tmp_path / "request.json"
    request.write_text(json.dumps(BODY), encoding="utf-8")
    async with running(tmp_path / "system") as cluster:
        system = cluster.system
        address = system.nats_url_of(CLIENT)
        asked = await program(
            sys.executable, str(EXAMPLES / "publish_job.py"), "--nats", address, "--id", "one", str(request)
        )
        assert asked.code == 0, asked.err
        await cluster.until(lambda record: has(record, JobStarted), "the job runs")
        heard = await program(
            sys.executable, str(EXAMPLES / "watch_scaling.py"), "--nats", system.nats_url_of(READER),
            "--schemas", str(SCHEMAS), "--count", "2",
        )  # fmt: skip
        assert (heard.code, heard.err) == (0, "")
        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "one")


async def say_a_notice(folder: Path, *, user: str) -> None:
    """Start a system and publish an interruption notice with this user's password."""
    refused = asyncio.Event()

    async def hear(error: Exception) -> None:
        if "spot.notice_received" in str(error):
            refused.set()

    async with running(folder) as cluster:
        connection = await nats.connect(cluster.system.nats_url_of(user), error_cb=hear)
        await connection.publish(SpotNoticeReceived.subject_root(), b"{}")
        async with asyncio.timeout(60):
            await refused.wait()
        await connection.close()
        assert not has(cluster.record, SpotNoticeReceived)


async def test_a_compromised_sensor_cannot_publish_a_notice(tmp_path: Path) -> None:
    """With the password of dcgm_ingest it is refused, nothing is recorded, and the server logs it."""
    with pytest.raises(AssertionError, match="more of the broker than it may"):
        await say_a_notice(tmp_path, user="dcgm_ingest")
