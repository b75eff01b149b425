"""The command line: data on stdout, messages on stderr, an exit code per outcome."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.front import Front, front
from tests.support.pod_templates import lacking
from tests.support.stories import TimedFact, job, node, on_sale

from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run

SUBMIT = ["jobs", "submit", "--name", "train", "--project", "research", "--image", "registry.example/train:1"]


@pytest.fixture
async def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """A gateway configured through the environment."""
    async with front(tmp_path) as opened:
        monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", opened.url)
        yield opened


async def _run(*tokens: str) -> int:
    """Run a command line in a thread, because commands block without an event loop."""
    return await asyncio.to_thread(run, tokens)


async def test_a_job_is_submitted_and_shown(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """Submitted from options, shown as JSON; messages stay off stdout."""
    assert await _run(*SUBMIT, "--gpus", "2", "--gpu-type", "A100", "-o", "name", "--", "python", "train.py") == Exit.OK
    job_id = capsys.readouterr().out.strip()
    assert job_id.startswith("job-")

    assert await _run("jobs", "show", job_id, "-o", "json") == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["job_name"], shown["gpu_count"], shown["gpu_type"]) == ("train", 2, "A100")
    row = await gate.model.store.job(JobId(job_id))
    assert row is not None
    assert row.spec.command == ("python", "train.py")


async def test_annotations_and_labels_are_options(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys have dots and slashes, values may be empty or contain an equals sign; an invalid pair is named."""
    annotations = {"gpu-autoscaler.io/checkpointed-at": "", "example.com/note": "a=b"}
    options = [part for key, value in annotations.items() for part in ("--annotation", f"{key}={value}")]
    assert await _run(*SUBMIT, "--gpus", "1", *options, "--label", "team=vision", "-o", "name") == Exit.OK
    row = await gate.model.store.job(JobId(capsys.readouterr().out.strip()))
    assert row is not None
    assert (row.spec.pod_annotations, row.spec.pod_labels) == (annotations, {"team": "vision"})

    assert await _run(*SUBMIT, "--gpus", "1", "--label", "team") == Exit.USAGE
    assert "--label team: expected KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"job_name": "from-file"}', "job_name: from-file\n"], ids=["json", "yaml"])
async def test_options_override_the_file(
    gate: Front, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    """A file may hold any part of the request, as JSON or YAML."""
    path = tmp_path / "request"
    path.write_text(text, encoding="utf-8")

    assert await _run(*SUBMIT[:2], *SUBMIT[4:], "--gpus", "1", "-f", str(path), "-o", "yaml") == Exit.OK

    assert yaml.safe_load(capsys.readouterr().out)["job_name"] == "from-file"


async def test_the_example_of_a_pod_template_is_accepted(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is; its template is in the store with every field."""
    example = Path(__file__).parents[3] / "examples" / "pod-template.yaml"
    assert await _run("jobs", "submit", "-f", str(example), "-o", "name") == Exit.OK
    stored = await gate.model.store.job_template(JobId(capsys.readouterr().out.strip()))
    assert stored is not None
    wanted = yaml.safe_load(example.read_text(encoding="utf-8"))["pod_template"]
    assert lacking(json.loads(stored), wanted) == []


async def test_a_request_can_be_piped(
    gate: Front, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-f -` reads stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO('{"run_seconds": 300}'))

    assert await _run(*SUBMIT, "--gpus", "1", "-f", "-", "-o", "name") == Exit.OK

    row = await gate.model.store.job(JobId(capsys.readouterr().out.strip()))
    assert row is not None
    assert row.spec.pod_annotations == {labels.SIMULATED_RUN_SECONDS: "300"}


async def test_each_outcome_has_its_exit_code(gate: Front, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Not found, invalid usage, a missing file, an unreachable gateway."""
    assert await _run("jobs", "show", "nobody") == Exit.NOT_FOUND
    assert await _run("why", "node", "nobody") == Exit.NOT_FOUND
    assert await _run("jobs", "show") == Exit.USAGE
    assert await _run("status", "--colour") == Exit.USAGE
    assert await _run(*SUBMIT, "-f", str(tmp_path / "missing")) == Exit.USAGE
    assert await _run("status", "--gateway", "http://127.0.0.1:1") == Exit.FAILURE
    assert "cannot reach the gateway" in capsys.readouterr().err
    assert await _run("status", "--gateway", "nonsense") == Exit.USAGE


async def test_wait_exits_by_the_jobs_outcome(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for completed, 1 for another final state, 4 for a time-out."""
    await gate.tell(job("good"), job("bad"), job("slow"))
    ends = {"good": "completed", "bad": "failed"}
    for job_id, outcome in ends.items():
        fact = JobFinished(job_id=JobId(job_id), outcome=outcome, finished_at=Clock().now())  # type: ignore[arg-type]  # from a table
        await gate.tell((TimedFact(fact, fact.finished_at),))

    assert await _run("jobs", "wait", "good") == Exit.OK
    assert await _run("jobs", "wait", "bad") == Exit.FAILURE
    assert await _run("jobs", "wait", "slow", "--timeout", "0.1") == Exit.TIME_OUT
    assert await _run("jobs", "wait", "nobody") == Exit.NOT_FOUND
    assert "job slow is still queued" in capsys.readouterr().err


async def test_cancel_prints_the_job(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """The name output is the job id."""
    await gate.tell(job("j1"))

    assert await _run("jobs", "cancel", "j1", "-o", "name") == Exit.OK
    assert capsys.readouterr().out == "j1\n"


@pytest.mark.parametrize(
    "command", [["status"], ["nodes"], ["jobs", "list"], ["plans"], ["cost"], ["events"], ["offers"], ["budget"]]
)
async def test_every_list_has_every_format(gate: Front, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """The same data as table, JSON, YAML and names; a piped table is not truncated."""
    await gate.tell(on_sale(), node("a-node-with-a-rather-long-name"), job("j1", placed_on=("n1",)))
    documents: list[Any] = []
    for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        assert await _run(*command, "-o", form) == Exit.OK
        documents.append(read(capsys.readouterr().out))
    assert type(documents[0]) is type(documents[1])
    for form in ("table", "name"):
        assert await _run(*command, "-o", form) == Exit.OK
        out = capsys.readouterr().out
        assert "…" not in out
        assert "\x1b[" not in out


async def test_without_spend_budgets_the_policy_fields_are_named(
    gate: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message on stderr instead of an empty table."""
    await gate.tell(on_sale())
    assert await _run("budget") == Exit.OK
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "limits.spend" in captured.err


async def test_a_long_list_is_fetched_in_pages(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """`--limit` counts jobs, not pages."""
    for number in range(3):
        await _run(*SUBMIT, "--gpus", "1", "--job-id", f"j{number}")
    capsys.readouterr()

    assert await _run("jobs", "list", "-o", "name", "--limit", "2") == Exit.OK

    assert capsys.readouterr().out == "j2\nj1\n"


async def test_followed_facts_are_lines(gate: Front) -> None:
    """JSON lines as they arrive, for other programs."""
    command = [
        sys.executable,
        "-m",
        "gpu_autoscaler_services.cli.main",
        "events",
        "-f",
        "--subject",
        "job.>",
        "-o",
        "json",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "GPU_AUTOSCALER_GATEWAY": gate.url}
    )
    try:
        async with asyncio.timeout(60):
            while not gate.model.tail.listeners_count:
                await asyncio.sleep(0.05)
            await gate.tell(job("j1"))
            assert process.stdout is not None
            lines = [json.loads(await process.stdout.readline()) for _ in range(2)]
    finally:
        process.kill()
        await process.wait()
    assert [line["type"] for line in lines] == ["job.requested.v1", "job.queued.v1"]


def test_help_imports_no_command() -> None:
    """Bus, HTTP servers and tables stay unloaded; commands are grouped by task."""
    code = (
        "import sys; from gpu_autoscaler_services.cli.main import run; run(['--help']); "
        "print([m for m in ('aiohttp', 'nats', 'gpu_autoscaler.core.plan') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
    for text in ("status", "jobs", "why", "dead-letters", "up", "Run jobs", "Understand decisions", "Operate"):
        assert text in done.stdout


def test_the_installed_command_exits_with_its_code() -> None:
    """The process's own exit code, as a shell sees it."""
    command = [
        sys.executable,
        "-m",
        "gpu_autoscaler_services.cli.main",
        "jobs",
        "show",
        "x",
        "--gateway",
        "http://127.0.0.1:1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot reach the gateway" in done.stderr
