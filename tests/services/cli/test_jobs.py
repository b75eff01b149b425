"""The job commands: names, history, descriptions, and the alias `odg gpu`."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.services.gateway.test_dry_runs import cluster_for_sale
from tests.support.front import Front, front
from tests.support.stories import job

from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run

SUBMIT = ["jobs", "submit", "--project", "research", "--image", "registry.example/train:1", "--gpus", "1", "-o", "name"]


@pytest.fixture
async def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """A gateway configured through the environment."""
    async with front(tmp_path) as opened:
        monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", opened.url)
        yield opened


async def _run(*tokens: str) -> int:
    """Run a command line in a thread, because commands block without an event loop."""
    return await asyncio.to_thread(run, tokens)


async def _submitted(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert await _run(*SUBMIT, "--name", name) == Exit.OK
    return capsys.readouterr().out.strip()


async def test_a_job_is_named_by_its_name(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """While one job has it; else the candidates are listed on stderr."""
    first = await _submitted(capsys, "train")
    for command in ("show", "describe", "cancel"):
        assert await _run("jobs", command, "train", "-o", "name") == Exit.OK
        assert capsys.readouterr().out.strip() == first
    second = await _submitted(capsys, "train")

    assert await _run("jobs", "show", "train") == Exit.USAGE
    told = capsys.readouterr().err
    assert "several jobs are named 'train'; use the id of one of them:" in told
    assert first in told
    assert second in told


async def test_history_is_filtered(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, outcome and time; times without an offset are UTC."""
    train, evaluation = await _submitted(capsys, "train"), await _submitted(capsys, "eval")
    await gate.model.store.finish_job(JobId(train), outcome="failed", finished_at=Clock().now())

    async def listed(*options: str) -> list[str]:
        assert await _run("jobs", "list", "-o", "name", *options) == Exit.OK
        return capsys.readouterr().out.split()

    assert await listed() == [evaluation, train]
    assert await listed("--name", "eval") == [evaluation]
    assert await listed("--state", "failed") == [train]
    assert await listed("--created-after", "2020-01-01T00:00:00", "--limit", "1") == [evaluation]
    assert await listed("--created-before", "2020-01-01T00:00:00") == []


async def test_a_description_has_every_field_and_the_history(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as one document."""
    await gate.tell(job("j1"))

    assert await _run("jobs", "describe", "j1") == Exit.OK
    told = capsys.readouterr().out
    assert "job id" in told
    assert "was accepted" in told
    assert await _run("jobs", "describe", "j1", "-o", "json") == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert document["job"]["job_id"] == "j1"
    assert document["why"]["sentences"]


@pytest.mark.parametrize(
    ("tokens", "code"), [(["gpu", "list", "-o", "json"], 0), (["gpu", "show", "nobody"], 3), (["--help"], 0), ([], 2)]
)
async def test_odg_gpu_is_the_job_commands(gate: Front, tokens: list[str], code: int) -> None:
    """With their exit codes."""
    command = [sys.executable, "-c", "from gpu_autoscaler_services.cli.main import odg; odg()", *tokens]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, env={**os.environ}, check=False
    )
    assert done.returncode == code, done.stderr
    if code == 0 and tokens[0] == "gpu":
        assert json.loads(done.stdout) == {"items": []}


async def test_a_dry_run_shows_what_would_be_bought(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes and prices, or why the job has to wait; nothing is submitted."""
    await gate.tell(*cluster_for_sale())
    small = ("--name", "train", "--memory", "1Gi", "--dry-run", "-o", "table")

    assert await _run(*SUBMIT[:-2], *small) == Exit.OK
    shown = capsys.readouterr()
    assert "nothing was submitted" in shown.err
    assert "INSTANCE TYPE" in shown.out
    assert await _run(*SUBMIT[:-2], "--cpu", "9999", *small) == Exit.OK
    shown = capsys.readouterr()
    assert ("No offer" in shown.err, shown.out) == (True, "")
    assert await gate.model.bus.last_sequence("JOB") == 0


async def test_an_expected_duration_is_shown_with_its_basis(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """From the option to the description; the time limit bounds it."""
    train = await _run(*SUBMIT, "--name", "train", "--expected-duration-seconds", "5400")
    assert train == Exit.OK
    job_id = capsys.readouterr().out.strip()
    row = await gate.model.store.job(JobId(job_id))
    assert row is not None
    assert row.spec.expected_duration_seconds == 5400.0

    assert await _run("jobs", "show", job_id, "-o", "json") == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert [shown[f"expected_run_seconds{part}"] for part in ("_low", "", "_high")] == [2700.0, 5400.0, 10800.0]
    assert shown["run_time_basis"] == "Expected to take 1 h 30 min (8 in 10 times 45 min to 3 h), by the request."
    assert await _run(*SUBMIT, "--name", "long", "--expected-duration-seconds", "1e9") == Exit.USAGE
    assert "expected_duration_seconds: is 1e+09; must be 1 to" in capsys.readouterr().err
