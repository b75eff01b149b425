"""`gpu-autoscaler jobs`: submit, list, show, describe, cancel, wait and read logs."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpu_autoscaler.runtime.documents import parse_yaml, read_text
from gpu_autoscaler_services.cli.client import Document, Gateway, plain
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import CommandGroup, DurationOrSeconds
from gpu_autoscaler_services.cli.output import Columns, Output, is_table, print_message, show, usd
from gpu_manager_sdk.calls import FINAL_STATES
from gpu_manager_sdk.errors import NotFound

HERE = Gateway()
WAIT_TARGETS = Literal["final", "running", "completed"]
JobName = Annotated[str, Parameter(help="Id, or name where one active job, or else one job, has it.")]

_GROUP = CommandGroup(
    "jobs",
    "jobs submit --name train --project p1 --image IMAGE --gpus 8",
    "jobs submit --file job.yaml --priority high -- python train.py",
    "jobs list --state running --mine",
    "jobs show train -o wide",
    "jobs describe train",
    "jobs logs train -f --tail 100",
    "jobs wait train --for completed --timeout 2h",
    "jobs cancel train",
)
jobs = _GROUP.app

_COLUMNS: Columns = (
    ("JOB ID", lambda row: row["job_id"]),
    ("NAME", lambda row: row["job_name"]),
    ("PROJECT", lambda row: row["project_id"]),
    ("STATUS", lambda row: row["status"]),
    ("GPUS", lambda row: f"{_members(row)}x{row['gpu_count']} {row['gpu_type'] or ''}".strip()),
    ("START", lambda row: f"{row['estimated_start_time'][:16]}Z" if row["estimated_start_time"] else "unknown"),
    ("QUEUE", lambda row: row["queue"]),
    ("QUEUE POSITION", lambda row: row["queue_position"]),
    ("NODES", lambda row: row["node_names"]),
    ("ESTIMATED COST", lambda row: "-" if row["estimated_cost_usd"] is None else f"${row['estimated_cost_usd']:,.2f}"),
    ("CREATED", lambda row: row["created_at"]),
    ("SUBMITTED BY", lambda row: row["submitted_by"]),
    ("MESSAGE", lambda row: row["message"]),
)
_WIDE = ("QUEUE", "QUEUE POSITION", "NODES", "ESTIMATED COST", "CREATED", "SUBMITTED BY", "MESSAGE")

_PURCHASE_COLUMNS: Columns = (
    ("NODES", lambda row: row["count"]),
    ("INSTANCE TYPE", lambda row: row["instance_type"]),
    ("ZONE", lambda row: row["zone"]),
    ("CAPACITY", lambda row: row["capacity_type"]),
    ("POOL", lambda row: row["pool"]),
    ("EACH PER HOUR", lambda row: usd(row["price_micro_usd_per_hour"])),
)


def _members(row: Mapping[str, Any]) -> str:
    least = row.get("min_members")
    return str(row["members"]) if least is None else f"{least}-{row['members']}"


def _show(document: Document, rows: list[Document], output: Output) -> None:
    show(document, rows, _COLUMNS, lambda row: str(row["job_id"]), output, wide=_WIDE)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `jobs submit`. None: the value of the file, else the gateway's default."""

    name: Annotated[str | None, Parameter(help="Name of the job.")] = None
    project: Annotated[str | None, Parameter(help="Project that the cost is charged to.")] = None
    image: Annotated[str | None, Parameter(help="Container image.")] = None
    gpus: Annotated[int | None, Parameter(help="GPUs per member.")] = None
    gpu_type: Annotated[
        str | None, Parameter(help="GPU model, e.g. A100, or several in order of preference (H100,A100). Default: any.")
    ] = None
    gpu_memory_gb: Annotated[float | None, Parameter(help="Minimum memory per GPU in GiB.")] = None
    gpu_fraction: Annotated[float | None, Parameter(help="Share of one GPU's memory, instead of whole GPUs.")] = None
    shared: Annotated[
        bool | None, Parameter(negative="--no-shared", help="Accept a part of one GPU with --gpu-memory-gb of memory.")
    ] = None
    members: Annotated[int | None, Parameter(help="Gang size: pods that start together or not at all.")] = None
    min_members: Annotated[
        int | None,
        Parameter(help="Elastic job: members that start together; the others join as capacity becomes free."),
    ] = None
    start_by_at: Annotated[
        str | None,
        Parameter(help="Deadline to start, RFC 3339; refused if the estimate is later, earliest first among equals."),
    ] = None
    finish_by_at: Annotated[
        str | None, Parameter(help="Deadline to end, RFC 3339, by the job's run time or time limit.")
    ] = None
    within: Annotated[
        str | None, Parameter(help="Node label (topology key) whose value must be equal for all members.")
    ] = None
    priority: Annotated[str | None, Parameter(help="low, medium, high, or 0..1000; higher starts first.")] = None
    cpu: Annotated[str | None, Parameter(help="CPU per member, as a Kubernetes quantity.")] = None
    memory: Annotated[str | None, Parameter(help="Memory per member, as a Kubernetes quantity.")] = None
    env: Annotated[dict[str, str] | None, Parameter(help="Environment variable: --env.NAME VALUE.")] = None
    annotation: Annotated[list[str] | None, Parameter(help="Pod annotation KEY=VALUE; repeatable.")] = None
    label: Annotated[list[str] | None, Parameter(help="Pod label KEY=VALUE; repeatable.")] = None
    max_duration_hours: Annotated[float | None, Parameter(help="Job time limit in hours.")] = None
    expected_duration_seconds: Annotated[
        float | None, Parameter(help="Expected run time, for estimates; the time limit stays the bound.")
    ] = None
    budget_limit_usd: Annotated[
        float | None, Parameter(help="Job budget: the job is terminated when its cost reaches it.")
    ] = None
    preemptible: Annotated[bool | None, Parameter(negative="--no-preemptible", help="May run on spot capacity.")] = None
    checkpoint_interval_minutes: Annotated[
        Literal["auto"] | float | None,
        Parameter(
            help="Minutes without a checkpoint after which the pods are asked to save; auto: computed; 0: never."
        ),
    ] = None
    workload_type: Annotated[str | None, Parameter(help="training, inference, batch, development ...")] = None
    runtime: Annotated[
        str | None, Parameter(help="Kind of workload object: job, jobset, pytorchjob, rayjob, volcano.")
    ] = None
    job_id: Annotated[str | None, Parameter(help="Your own id; submitting it again does not create another job.")] = (
        None
    )

    def body(self, base: Document, command: tuple[str, ...]) -> Document:
        """Return the request: the file's fields, overridden by the options."""
        priority = self.priority
        flat = {
            "job_name": self.name,
            "project_id": self.project,
            "members": self.members,
            "min_members": self.min_members,
            "within": self.within,
            "start_by_at": self.start_by_at,
            "finish_by_at": self.finish_by_at,
            "priority": int(priority) if priority is not None and priority.isdigit() else priority,
            "max_duration_hours": self.max_duration_hours,
            "expected_duration_seconds": self.expected_duration_seconds,
            "budget_limit_usd": self.budget_limit_usd,
            "preemptible": self.preemptible,
            "checkpoint_interval_minutes": self.checkpoint_interval_minutes,
            "workload_type": self.workload_type,
            "runtime": self.runtime,
            "job_id": self.job_id,
        }
        nested: dict[str, dict[str, Any]] = {
            "gpu_requirements": {
                "gpu_count": self.gpus,
                "gpu_type": _gpu_types(self.gpu_type),
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


def _gpu_types(text: str | None) -> str | list[str] | None:
    """Return comma-separated models as a list; a single model stays a string."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    return names if len(names) > 1 else text


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Split each KEY=VALUE at the first `=`."""
    pairs = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator:
            raise Stop(f"{option} {text}: expected KEY=VALUE; VALUE may be empty", Exit.USAGE)
        pairs[key] = value
    return pairs


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


NO_OPTIONS = Request()


@_GROUP.command
def submit(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    file: Annotated[
        str | None,
        Parameter(name=["--file", "-f"], allow_leading_hyphen=True, help="Request as JSON or YAML; - reads stdin."),
    ] = None,
    request: Annotated[Request, Parameter(name="*")] = NO_OPTIONS,
    idempotency_key: Annotated[
        str | None, Parameter(help="Repeating a request with the same key submits one job.")
    ] = None,
    dry_run: Annotated[
        bool, Parameter(help="Check the request and show what would be bought; submit nothing.")
    ] = False,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """Submit a job from options, from a file, or from both (options win).

    Arguments after -- are the container's command.
    """
    if file is None and (
        missing := [f"--{name}" for name in ("name", "project", "gpus") if getattr(request, name) is None]
    ):
        raise Stop(f"missing: {', '.join(missing)}; give them, or a request with --file", Exit.USAGE)
    body = request.body({} if file is None else _read(file), command)
    if dry_run:
        _show_simulated(plain(gateway.client.simulate(body)), output)
        return
    accepted = plain(gateway.client.submit(body, idempotency_key=idempotency_key))
    if is_table(output):
        print_message(f"accepted; wait for it with: gpu-autoscaler jobs wait {accepted['job_id']}")
    _show(accepted, [accepted], output)


def _show_simulated(plan: Document, output: Output) -> None:
    (job,) = plan["jobs"]
    if is_table(output):
        print_message(f"valid; nothing was submitted. {job['message']}")
        if not job["purchases"]:
            return
    show(plan, job["purchases"], _PURCHASE_COLUMNS, lambda row: str(row["instance_type"]), output)


def _read(path: str) -> Document:
    documents = parse_yaml(sys.stdin.read() if path == "-" else read_text(Path(path)), f"request {path}")
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise Stop(
            f"request {path} is not one object; expected fields such as job_name, project_id, container", Exit.USAGE
        )
    return documents[0]


@_GROUP.command
def list_(  # noqa: PLR0913 - one for each option
    *,
    state: Annotated[list[str] | None, Parameter(help="Only jobs in this state; repeatable.")] = None,
    project: Annotated[str | None, Parameter(help="Only jobs of this project.")] = None,
    name: Annotated[str | None, Parameter(help="Only jobs of this name.")] = None,
    created_after: Annotated[datetime | None, Parameter(help="Only jobs created at this time or later (UTC).")] = None,
    created_before: Annotated[datetime | None, Parameter(help="Only jobs created before this time (UTC).")] = None,
    mine: Annotated[bool, Parameter(help="Only jobs that you submitted, by the name of your token.")] = False,
    submitted_by: Annotated[str | None, Parameter(help="Only jobs that this user submitted.")] = None,
    queue: Annotated[str | None, Parameter(help="Only jobs of this queue.")] = None,
    limit: Annotated[int, Parameter(help="Number of jobs, newest first.")] = 100,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List jobs, newest first, also those that ended."""
    listed = gateway.client.list(
        state=tuple(state or ()),
        project_id=project,
        job_name=name,
        submitted_by=submitted_by,
        queue=queue,
        mine=mine,
        created_after=_utc(created_after),
        created_before=_utc(created_before),
        limit=limit,
    )
    items = [plain(job) for job in listed]
    _show({"items": items}, items, output)


def _utc(at: datetime | None) -> datetime | None:
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at


@_GROUP.command
def show_(job: JobName, /, *, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show one job."""
    shown = plain(gateway.client.get(job))
    _show(shown, [shown], output)


@_GROUP.command
def describe(job: JobName, /, *, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Show every field of a job, what it waits for, and its history."""
    client = gateway.client
    shown = plain(client.get(job))
    try:
        why = plain(client.why("job", shown["job_id"]))
    except NotFound:  # it ended so long ago that its facts have expired; the store still has the job
        why = {"now": "", "sentences": []}
    if not is_table(output):
        show({"job": shown, "why": why}, [shown], (), lambda row: str(row["job_id"]), output)
        return
    fields = [{"name": name.replace("_", " "), "value": value} for name, value in shown.items()]
    show(shown, fields, (("", lambda row: row["name"]), ("", lambda row: row["value"])), lambda _: "", output)
    print("\n".join(("", *filter(None, (why["now"],)), *why["sentences"])))


@_GROUP.command
def cancel(job: JobName, /, *, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Cancel a job."""
    cancelled = plain(gateway.client.cancel(job))
    if is_table(output):
        print_message("cancellation requested; the job ends within seconds")
    _show(cancelled, [cancelled], output)


@_GROUP.command
def logs(
    job: JobName,
    /,
    *,
    member: Annotated[int, Parameter(help="Member of the job, from 0.")] = 0,
    container: Annotated[str | None, Parameter(help="Container of the pod. Default: its first.")] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Print new lines until the container ends.")
    ] = False,
    tail: Annotated[int | None, Parameter(help="Only this many of the last lines.")] = None,
    previous: Annotated[bool, Parameter(help="Of the container before its last restart.")] = False,
    timestamps: Annotated[bool, Parameter(help="Begin each line with its time.")] = False,
    gateway: Gateway = HERE,
) -> None:
    """Print what a member of a job has written."""
    lines = gateway.client.logs(
        job,
        member=member,
        container=container,
        follow=follow,
        tail_lines=tail,
        previous=previous,
        timestamps=timestamps,
    )
    for line in lines:
        print(line, flush=follow)


@_GROUP.command
def wait(
    job: JobName,
    /,
    *,
    until: Annotated[WAIT_TARGETS, Parameter(name="--for", help="State to wait for.")] = "final",
    timeout_seconds: Annotated[
        DurationOrSeconds,
        Parameter(name=["--timeout", "--timeout-seconds"], help="Maximum wait in wall time: 45m, 2h."),
    ] = 3600.0,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> int:
    """Wait for a job.

    Exit codes: 0 state reached (for final: completed), 1 ended in another state, 4 timed out.
    """
    for change in gateway.client.changes(job, timeout_seconds=timeout_seconds):
        print_message(f"{change.job_id} {change.status}")
        if change.status == until or change.status in FINAL_STATES:
            _show(plain(change), [plain(change)], output)
            return Exit.OK if change.status in {"completed", until} else Exit.FAILURE
    raise AssertionError("changes end with a final state")
