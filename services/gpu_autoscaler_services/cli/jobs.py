"""`gpu-autoscaler jobs ...`: submit, list, show, cancel and wait."""

import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from gpu_autoscaler_services.cli.client import Document, Gateway, part
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.output import Columns, Output, show, words

HERE = Gateway()
POLL_SECONDS = 1.0
FINAL = ("completed", "failed", "cancelled")
REMARKABLE = Literal["final", "running", "completed"]

jobs = App(name="jobs", help="Submit, list, show, cancel and wait for jobs.")

_COLUMNS: Columns = (
    ("JOB ID", lambda row: row["job_id"]),
    ("NAME", lambda row: row["job_name"]),
    ("PROJECT", lambda row: row["project_id"]),
    ("STATUS", lambda row: row["status"]),
    ("QUEUE", lambda row: row["queue_position"]),
    ("GPUS", lambda row: f"{_members(row)}x{row['gpu_count']} {row['gpu_type'] or ''}".strip()),
    ("NODES", lambda row: row["node_names"]),
    ("STARTS", lambda row: (row["estimated_start_time"] or "unknown")[:19]),
    ("COST", lambda row: "-" if row["estimated_cost_usd"] is None else f"${row['estimated_cost_usd']:,.2f}"),
    ("CREATED", lambda row: row["created_at"][:19] + "Z"),
    ("MESSAGE", lambda row: row["message"]),
)


def _members(row: Mapping[str, Any]) -> str:
    least = row.get("min_members")
    return str(row["members"]) if least is None else f"{least}-{row['members']}"


def _show(document: Document, rows: list[Document], output: Output) -> None:
    show(document, rows, _COLUMNS, lambda row: str(row["job_id"]), output)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the flags of `jobs submit` add up to; None leaves it to the file, or to the gateway's default."""

    name: Annotated[str | None, Parameter(help="Name of the job.")] = None
    project: Annotated[str | None, Parameter(help="Project that pays.")] = None
    image: Annotated[str | None, Parameter(help="Container image.")] = None
    gpus: Annotated[int | None, Parameter(help="GPUs of each member.")] = None
    gpu_type: Annotated[
        str | None, Parameter(help="GPU model, e.g. A100, or several (H100,A100), the best first; any when left out.")
    ] = None
    gpu_memory_gb: Annotated[float | None, Parameter(help="Least memory of one GPU in GiB.")] = None
    gpu_fraction: Annotated[float | None, Parameter(help="A part of one GPU will do: this share of its memory.")] = None
    shared: Annotated[bool | None, Parameter(help="A part of one GPU will do: with --gpu-memory-gb of memory.")] = None
    members: Annotated[int | None, Parameter(help="Pods that start together or not at all.")] = None
    min_members: Annotated[
        int | None, Parameter(help="So many start together; the others join where and when there is room.")
    ] = None
    start_by_at: Annotated[
        str | None, Parameter(help="RFC 3339 instant; of equal priority the earliest goes first.")
    ] = None
    within: Annotated[str | None, Parameter(help="Label of nodes whose value all members share.")] = None
    priority: Annotated[str | None, Parameter(help="low, medium, high, or 0..1000; higher goes first.")] = None
    cpu: Annotated[str | None, Parameter(help="CPU of each member, as a Kubernetes quantity.")] = None
    memory: Annotated[str | None, Parameter(help="Memory of each member, as a Kubernetes quantity.")] = None
    env: Annotated[dict[str, str] | None, Parameter(help="Environment: --env.NAME VALUE.")] = None
    annotation: Annotated[list[str] | None, Parameter(help="KEY=VALUE on each pod; may be repeated.")] = None
    label: Annotated[list[str] | None, Parameter(help="KEY=VALUE on each pod; may be repeated.")] = None
    max_duration_hours: Annotated[float | None, Parameter(help="Ended after this many hours.")] = None
    budget_limit_usd: Annotated[float | None, Parameter(help="Ended when it has cost this much.")] = None
    preemptible: Annotated[bool | None, Parameter(help="May run on spot capacity.")] = None
    workload_type: Annotated[str | None, Parameter(help="training, inference, batch, development ...")] = None
    runtime: Annotated[
        str | None, Parameter(help="What makes its members: job, jobset, pytorchjob, rayjob, volcano.")
    ] = None
    job_id: Annotated[str | None, Parameter(help="Id of your choice: the same one twice is one job.")] = None

    def body(self, base: Document, command: tuple[str, ...]) -> Document:
        """The request: what the file says, and the flags above it."""
        priority = self.priority
        flat = {
            "job_name": self.name,
            "project_id": self.project,
            "members": self.members,
            "min_members": self.min_members,
            "within": self.within,
            "start_by_at": self.start_by_at,
            "priority": int(priority) if priority is not None and priority.isdigit() else priority,
            "max_duration_hours": self.max_duration_hours,
            "budget_limit_usd": self.budget_limit_usd,
            "preemptible": self.preemptible,
            "workload_type": self.workload_type,
            "runtime": self.runtime,
            "job_id": self.job_id,
        }
        nested: dict[str, dict[str, Any]] = {
            "gpu_requirements": {
                "gpu_count": self.gpus,
                "gpu_type": _one_or_several(self.gpu_type),
                "gpu_memory_gb": self.gpu_memory_gb,
                "gpu_fraction": self.gpu_fraction,
                "is_shared": self.shared,
            },
            "container": {"image": self.image, "command": list(command) or None, "env": self.env},
            "resources": {"cpu": self.cpu, "memory": self.memory},
            "pod_annotations": _pairs("--annotation", self.annotation),
            "pod_labels": _pairs("--label", self.label),
        }
        body = {**base, **_known(flat)}
        for name, fields in nested.items():
            if known := _known(fields):
                body[name] = {**(body.get(name) or {}), **known}
        return body


def _one_or_several(said: str | None) -> str | list[str] | None:
    """What stands between commas, the best first; one alone is no list."""
    names = [] if said is None else [name.strip() for name in said.split(",")]
    return names if len(names) > 1 else said


def _pairs(flag: str, said: list[str] | None) -> dict[str, str]:
    """What stands before and after the first `=`."""
    found = {}
    for each in said or ():
        key, is_there, value = each.partition("=")
        if not is_there:
            raise Stop(f"{flag} {each}: say KEY=VALUE; the value may be empty", Exit.USAGE)
        found[key] = value
    return found


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


NO_FLAGS = Request()


@jobs.command
def submit(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    file: Annotated[
        str | None,
        Parameter(name=["--file", "-f"], allow_leading_hyphen=True, help="JSON or YAML request; - reads stdin."),
    ] = None,
    request: Annotated[Request, Parameter(name="*")] = NO_FLAGS,
    idempotency_key: Annotated[str | None, Parameter(help="The same key twice is one job.")] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Ask for a job, from flags, from a file, or from both (flags win). Words after -- are the container's command."""
    body = request.body({} if file is None else _read(file), command)
    key = idempotency_key or str(uuid.uuid4())
    accepted = gateway.send("POST", "gpu/jobs", body, {"Idempotency-Key": key})
    if output == "table":
        words(f"accepted; follow it with: gpu-autoscaler jobs wait {accepted['job_id']}")
    _show(accepted, [accepted], output)


def _read(path: str) -> Document:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Stop(f"{path} cannot be read: {error}", Exit.USAGE) from error
    import yaml  # noqa: PLC0415 - only with --file

    try:
        document = yaml.safe_load(text)  # YAML holds JSON
    except yaml.YAMLError as error:
        raise Stop(f"{path} is neither JSON nor YAML: {error}", Exit.USAGE) from error
    if not isinstance(document, dict):
        raise Stop(f"{path} holds no request: expected fields such as job_name", Exit.USAGE)
    return document


@jobs.command(name="list")
def list_(
    *,
    state: Annotated[list[str] | None, Parameter(help="Only jobs in this state; may be repeated.")] = None,
    project: Annotated[str | None, Parameter(help="Only jobs of this project.")] = None,
    limit: Annotated[int, Parameter(help="How many, newest first; pages are fetched as needed.")] = 100,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List jobs, newest first."""
    items: list[Document] = []
    cursor = None
    while len(items) < limit:
        page = gateway.read(
            "gpu/jobs", state=state, project_id=project, limit=min(200, limit - len(items)), cursor=cursor
        )
        items += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    _show({"items": items}, items, output)


@jobs.command(name="show")
def show_(job_id: str, /, *, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show one job."""
    job = gateway.read(f"gpu/jobs/{part(job_id)}")
    _show(job, [job], output)


@jobs.command
def cancel(job_id: str, /, *, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Ask for a job to end."""
    job = gateway.send("DELETE", f"gpu/jobs/{part(job_id)}")
    if output == "table":
        words("asked for; it ends within seconds")
    _show(job, [job], output)


@jobs.command
def wait(
    job_id: str,
    /,
    *,
    until: Annotated[REMARKABLE, Parameter(name="--for", help="What to wait for.")] = "final",
    timeout_seconds: Annotated[float, Parameter(name=["--timeout", "--timeout-seconds"], help="Wall time.")] = 3600.0,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> int:
    """Wait for a job. Exits 0 when it came to what was waited for (completed, for final), 1 when it ended otherwise,
    4 when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    status = ""
    while True:
        job = gateway.read(f"gpu/jobs/{part(job_id)}")
        if job["status"] != status:
            status = job["status"]
            words(f"{job_id} {status}")
        if status in FINAL or status == until:
            _show(job, [job], output)
            return Exit.OK if status in {"completed", until} else Exit.FAILURE
        if time.monotonic() + POLL_SECONDS > deadline:
            raise Stop(f"{job_id} is still {status} after {timeout_seconds:g} s", Exit.TIME_OUT)
        time.sleep(POLL_SECONDS)
