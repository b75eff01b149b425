"""The command line against a running system, as subprocesses: output and exit codes."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import yaml
from tests.support.outside import Said, cli
from tests.support.running import Running, running

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.events.job import JobStarted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.replay.recompute import Verdict
from gpu_autoscaler_services.cli.exits import Exit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SUBMIT = ("jobs", "submit", "--name", "train", "--project", "research", "--image", "registry.example/train:1")
T4 = ("--gpus", "1", "--gpu-type", "T4", "--cpu", "1", "--memory", "2Gi")


class Stage:
    """A system with one job that runs on a node that was bought for it."""

    def __init__(self, cluster: Running, job_id: str) -> None:
        self.cluster = cluster
        self.job_id = job_id

    async def run(self, *tokens: str) -> Said:
        """Run a command that succeeds without messages."""
        said = await cli(self.cluster, *tokens)
        assert (said.code, said.err) == (Exit.OK, ""), tokens
        return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """A system with a job that was submitted and awaited by commands."""
    async with running(tmp_path_factory.mktemp("commands")) as cluster:
        submitted = await cli(cluster, *SUBMIT, *T4, "-o", "name", "--", "python", "train.py", "--epochs", "3")
        assert submitted.code == Exit.OK, submitted.err
        job_id = submitted.out.strip()
        waited = await cli(cluster, "jobs", "wait", job_id, "--for", "running", "--timeout", "60", "-o", "name")
        assert (waited.code, waited.out.strip()) == (Exit.OK, job_id), waited.err
        assert f"{job_id} running" in waited.err
        await cluster.until(lambda record: record.count(JobStarted) == 1, "the job runs")
        yield Stage(cluster, job_id)


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        (["status"], ["GPUs", "jobs", "price per hour", "cost of spreading spot", "last plan"]),
        (["nodes"], ["NAME", "PHASE", "TYPE", "CAPACITY", "GPUS", "PRICE/H"]),
        (["jobs", "list"], ["JOB ID", "NAME", "PROJECT", "STATUS", "GPUS", "START"]),
        (["plans"], ["PLAN", "AT", "ACTION", "SUBJECT", "REASON"]),
        (["events", "--subject", "job.>"], ["TIME", "TYPE", "ID", "SOURCE"]),
        (["cost"], ["SCOPE", "ALLOCATED", "IDLE", "total"]),
    ],
    ids=lambda value: value[0] if value and value[0].islower() else "",
)
async def test_every_view_has_every_format(stage: Stage, command: list[str], columns: list[str]) -> None:
    """Table, JSON and YAML with the same data; names, one per line."""
    table = await stage.run(*command)
    names = await stage.run(*command, "-o", "name")

    assert all(column in table.out for column in columns)
    assert not any(trace in table.out for trace in ("None", "{", "UTC)"))
    assert isinstance((await stage.run(*command, "-o", "json")).json, dict | list)
    assert isinstance(yaml.safe_load((await stage.run(*command, "-o", "yaml")).out), dict | list)
    assert all(" " not in line.strip() for line in names.lines) or command == ["status"]


async def test_the_numbers_are_those_of_the_cluster(stage: Stage) -> None:
    """One T4, used by one job, on one node with a price."""
    status = (await stage.run("status", "-o", "json")).json
    (node,) = (await stage.run("nodes", "-o", "json")).json["items"]
    job = (await stage.run("jobs", "show", stage.job_id, "-o", "json")).json

    assert (status["gpu_count"], status["gpu_busy_count"], status["jobs_by_status"]) == (1, 1, {"running": 1})
    assert (node["gpu_model"], node["gpu_busy_count"], node["pods"][0]["job_id"]) == ("T4", 1, stage.job_id)
    assert status["price_micro_usd_per_hour"] == node["price_micro_usd_per_hour"] > 0
    assert (job["status"], job["node_names"]) == ("running", [node["name"]])


async def test_why_leads_back_to_the_requesting_job(stage: Stage) -> None:
    """Job, pod and node have the same first cause and the same purchase."""
    (node,) = (await stage.run("nodes", "-o", "json")).json["items"]
    pod = node["pods"][0]["pod"]
    for kind, name in (("job", stage.job_id), ("job", "train"), ("pod", pod), ("node", node["name"])):
        _, _, *story = (await stage.run("why", kind, name)).lines  # after the current state and an empty line
        steps = ("requested job train with 1 T4 GPU", "was accepted", "Buy ", "selected from", "The cloud launched")
        told = "\n".join(story)
        assert [step for step in steps if step not in told] == []
        assert "Project research" in story[0]
        assert (await stage.run("why", kind, name, "-o", "json")).json["sentences"][: len(story)] == story


async def test_every_plan_is_recomputed_byte_for_byte(stage: Stage) -> None:
    """An unknown plan has its own exit code."""
    await asyncio.sleep(2)
    plan_ids = [fact.plan_id for fact, _ in stage.cluster.record.of(ScalingPlanMade)]
    assert plan_ids
    for plan_id in plan_ids:
        assert f"{plan_id}: equal byte for byte" in (await stage.run("recompute", plan_id)).out
    unknown = await cli(stage.cluster, "recompute", "nothing")
    assert (unknown.code, unknown.out) == (Verdict.UNKNOWN_PLAN, "")
    assert "no plan 'nothing'" in unknown.err


async def test_another_policy_has_its_own_exit_code(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A difference would prove nothing about the code."""
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(f"max_gpus_per_job = {DEFAULT_POLICY.max_gpus_per_job + 1}\n", encoding="utf-8")
    plan_id = next(fact.plan_id for fact, _ in stage.cluster.record.of(ScalingPlanMade))

    said = await cli(stage.cluster, "recompute", plan_id, "--policy", str(path))

    assert (said.code, said.out) == (Verdict.POLICY_CHANGED, "")
    assert "--policy" in said.err


@pytest.mark.parametrize(
    ("tokens", "code", "phrase"),
    [
        (["jobs", "show", "nobody"], Exit.NOT_FOUND, "job 'nobody' not found"),
        (["jobs", "cancel", "nobody"], Exit.NOT_FOUND, "job 'nobody' not found"),
        (["why", "node", "nobody"], Exit.NOT_FOUND, "no node with name or id 'nobody'"),
        (["why", "cat", "nobody"], Exit.USAGE, "cat"),
        (["jobs", "list", "--state", "dreaming"], Exit.USAGE, "state: Invalid enum value 'dreaming'; use one of "),
        ([*SUBMIT, "--gpus", "-1"], Exit.USAGE, "gpu_requirements.gpu_count: is -1"),
        ([*SUBMIT, "--gpus", "1", "--gpu-type", "T1000"], Exit.USAGE, "'T1000' is not an available GPU model"),
        (["dead-letters", "resubmit", "999"], Exit.FAILURE, "dead letter 999 not found"),
        (["dead-letters", "resubmit"], Exit.USAGE, "--all"),
        (["status", "--gateway", "http://127.0.0.1:9"], Exit.FAILURE, "cannot reach the gateway"),
        (["dead-letters", "list", "--nats", "nats://127.0.0.1:9"], Exit.TIME_OUT, "no NATS server answered"),
        (["nonsense"], Exit.USAGE, "nonsense"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
async def test_errors_are_on_stderr_with_an_exit_code(stage: Stage, tokens: list[str], code: Exit, phrase: str) -> None:
    """Stdout stays empty, and no traceback is shown."""
    said = await cli(stage.cluster, *tokens)

    assert (said.code, said.out) == (code, "")
    assert phrase in said.err
    assert "Traceback" not in said.err


async def test_waiting_for_a_cancelled_job_fails(stage: Stage) -> None:
    """A time-out and another final state have different exit codes."""
    job_id = (await stage.run(*SUBMIT, *T4, "-o", "name")).out.strip()
    late = await cli(stage.cluster, "jobs", "wait", job_id, "--timeout", "0.5")
    cancelled = await cli(stage.cluster, "jobs", "cancel", job_id, "-o", "name")
    ended = await cli(stage.cluster, "jobs", "wait", job_id, "--timeout", "60", "-o", "json")

    assert (late.code, late.out) == (Exit.TIME_OUT, "")
    assert f"{job_id} is still" in late.err
    assert (cancelled.code, cancelled.out.strip()) == (Exit.OK, job_id)
    assert (ended.code, ended.json["status"]) == (Exit.FAILURE, "cancelled")
