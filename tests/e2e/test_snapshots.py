"""The scaler is killed after its last snapshot: snapshot and later facts restore its state."""

import asyncio
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_story import QUIET_SECONDS_MAX, has, kept, request
from tests.support.running import Running, running

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobPlaced, JobQueued, JobStarted
from gpu_autoscaler.runtime.snapshot_codec import Label, decode_label, decode_snapshot
from gpu_autoscaler_services.scaler.service import Scaler

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

STARTED = "state restored from snapshot"
REFUSED = "snapshot refused"
# The cost tracker has snapshots of its own, under its name.
OF_SCALER = "FROM snapshots WHERE service = ''"


def asked(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on the store while the services have it open."""
    connection = sqlite3.connect(folder / "store.db", timeout=10)
    try:
        with connection:
            return connection.execute(statement).fetchall()
    finally:
        connection.close()


async def until_kept(folder: Path) -> None:
    """Wait for a snapshot of all facts so far."""
    newest = f"SELECT coalesce(max(number), 0) {OF_SCALER}"
    before = asked(folder, newest)
    async with asyncio.timeout(60):
        while asked(folder, newest) <= before:
            await asyncio.sleep(0.1)


async def freeze_at_rest(cluster: Running, folder: Path) -> None:
    """Pause the scaler while it does not hold the store's lock."""
    for _ in range(10):
        pid = cluster.freeze("scaler")
        try:
            asked(folder, "BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
        else:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the scaler held the store's lock at every check")


def last_kept(folder: Path) -> tuple[Label, ClusterState]:
    """The last snapshot of the scaler."""
    sealed, body = asked(folder, f"SELECT label, body {OF_SCALER} ORDER BY number DESC LIMIT 1")[0]
    label = decode_label(sealed)
    assert isinstance(label, Label)
    state = decode_snapshot(sealed, body)
    assert isinstance(state, ClusterState)
    return label, state


def folded(cluster: Running, label: Label) -> ClusterState:
    """All facts up to the label's cut, from the beginning of the streams."""
    last = dict(label.cut.last_sequences)
    facts = [seen.recorded for seen in cluster.record.seen]
    return fold(
        EMPTY_STATE,
        [one for one in facts if type(one.fact) in Scaler.folds and one.sequence <= last.get(one.stream, 0)],
    )


def said(cluster: Running, words: str) -> int:
    """Return how often the scaler logged it."""
    return cluster.system.children["scaler"].log.read_text(errors="replace").count(words)


@pytest.mark.sweep
async def test_a_killed_scaler_restores_its_state_from_snapshot_and_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between snapshot and tail, then once more with every snapshot torn: all plans are recomputable from the
    whole streams, byte for byte, and the last state is that of the whole streams."""
    monkeypatch.setenv("GPU_AUTOSCALER_STORE_SNAPSHOT_SECONDS", "1")
    async with running(tmp_path) as cluster:
        await cluster.player.submit(request("job-0"), "nats")
        await cluster.until(lambda record: has(record, JobStarted, job_id="job-0"), "the first job runs")
        await until_kept(tmp_path)
        await freeze_at_rest(cluster, tmp_path)
        await cluster.player.submit(request("job-1", gpus=4), "nats")
        await cluster.until(lambda record: has(record, JobQueued, job_id="job-1"), "the second job, behind its back")
        before = said(cluster, STARTED)
        await cluster.kill("scaler")
        assert said(cluster, STARTED) == before + 1
        assert said(cluster, REFUSED) == 0
        await cluster.until(lambda record: has(record, JobPlaced, job_id="job-1"), "a place for the second job")

        await freeze_at_rest(cluster, tmp_path)
        asked(tmp_path, "UPDATE snapshots SET body = substr(body, 1, length(body) / 2)")
        await cluster.player.submit(request("job-2"), "nats")
        await cluster.kill("scaler")
        assert said(cluster, REFUSED) > 0
        assert said(cluster, STARTED) == before + 1

        kept(await cluster.report_when_quiet(QUIET_SECONDS_MAX), "job-0", "job-1", "job-2")
        assert await cluster.system.children["scaler"].stop() == 0
        label, state = last_kept(tmp_path)
        assert state == folded(cluster, label)
        assert len(state.jobs) == 3
