"""The store is PostgreSQL, and its server is killed under the running system."""

from pathlib import Path

import pytest
from tests.e2e.test_rebuild import until_quiet
from tests.e2e.test_story import has, request
from tests.support.outside import ask
from tests.support.postgres import PostgresServer, postgres
from tests.support.running import followed, started

from gpu_autoscaler.events.job import JobQueued, JobStarted
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler_services.local.system import ExternalSystems

__all__ = ["postgres"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.sweep, pytest.mark.timeout(300)]


async def test_a_killed_store_loses_nothing(tmp_path: Path, postgres: PostgresServer) -> None:
    """Running jobs continue; requests meanwhile wait or get 503; afterwards all costs are charged."""
    external = ExternalSystems(store_url=postgres.url())
    async with started(tmp_path, external=external) as system, followed(system) as cluster:
        await cluster.player.submit(request("before", run_seconds=300.0), "rest")
        await cluster.until(lambda record: has(record, JobStarted, job_id="before"), "the first job runs")
        postgres.kill()
        await cluster.player.submit(request("meanwhile", run_seconds=30.0), "nats")
        answer = await ask(cluster, "GET", "/api/v1/gpu/jobs")
        assert answer.status == 503
        assert "check that the server runs" in answer.body["detail"]
        assert "secret-of-tests" not in str(answer.body)
        postgres.start()
        await cluster.until(lambda record: has(record, JobQueued, job_id="meanwhile"), "the second job is queued")
        await cluster.player.submit(request("after", run_seconds=30.0), "rest")
        await until_quiet(cluster, postgres.url())
    store = await open_store(postgres.url(), is_read_only=True)
    page = await store.jobs()
    outcomes = {row.spec.job_id: row.outcome for row in page.rows}
    assert outcomes == dict.fromkeys(("before", "meanwhile", "after"), "completed")
    await store.close()
