"""`gpu-autoscaler demand`: report demand for work that is about to arrive, and list active reports."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from cyclopts import Parameter

from gpu_autoscaler_services.cli.client import Document, Gateway, plain
from gpu_autoscaler_services.cli.options import CommandGroup, DurationOrSeconds
from gpu_autoscaler_services.cli.output import Columns, Output, is_table, print_message, show

HERE = Gateway()
HOUR_SECONDS = 3600.0

_GROUP = CommandGroup(
    "demand",
    "demand report nightly-eval --count 4 --gpus 1 --for 2h",
    "demand report nightly-eval --count 0 --gpus 1",
    "demand list",
)
demand = _GROUP.app

_COLUMNS: Columns = (
    ("SOURCE", lambda row: row["source"]),
    ("COUNT", lambda row: "unknown" if row["count"] is None else str(row["count"])),
    ("GPUS EACH", lambda row: f"{row['shape']['gpu_count']} {row['shape']['gpu_type'] or ''}".strip()),
    ("PRIORITY", lambda row: row["priority"]),
    ("UNTIL", lambda row: row["until"]),
    ("MESSAGE", lambda row: row["message"] or row["note"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportedDemand:
    """The options of `demand report`."""

    count: Annotated[int, Parameter(help="Members that capacity is kept free for; 0 ends the report.")]
    gpus: Annotated[int, Parameter(help="GPUs per member.")]
    gpu_type: Annotated[str | None, Parameter(help="GPU model, e.g. A100. Default: any.")] = None
    cpu: Annotated[str, Parameter(help="CPU per member, as a Kubernetes quantity.")] = "1"
    memory: Annotated[str, Parameter(help="Memory per member, as a Kubernetes quantity.")] = "4Gi"
    seconds: Annotated[
        DurationOrSeconds,
        Parameter(name=["--for", "--seconds"], help="Validity in cluster time: 90m, 2h; report again to extend."),
    ] = HOUR_SECONDS
    priority: Annotated[str, Parameter(help="low, medium, high, or 0..1000; orders reports among each other.")] = (
        "medium"
    )
    note: Annotated[str, Parameter(help="Note, shown in lists.")] = ""

    def body(self, source: str, now: datetime) -> Document:
        """Return the request body of a report made at `now`, in cluster time."""
        return {
            "source": source,
            "shape": {"gpu_count": self.gpus, "gpu_type": self.gpu_type, "cpu": self.cpu, "memory": self.memory},
            "count": self.count,
            "until": (now + timedelta(seconds=self.seconds)).isoformat(),
            "priority": int(self.priority) if self.priority.isdigit() else self.priority,
            "note": self.note,
        }


@_GROUP.command
def report(source: str, /, *, reported: ReportedDemand, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Report demand of a source. A new report replaces the source's previous one.

    Pods and jobs have precedence, whatever the priority. Report a smaller count when the work has arrived.

    Parameters
    ----------
    source: str
        Name of the reporting system, e.g. nightly-eval.
    """
    client = gateway.client
    accepted = plain(client.report_demand(reported.body(source, client.status().as_of)))
    if is_table(output):
        print_message("accepted; list active reports with: gpu-autoscaler demand list")
    show(accepted, [accepted], _COLUMNS, lambda row: str(row["source"]), output)


@_GROUP.command
def list_(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """List active reports and why capacity for one is still missing."""
    document = gateway.read_all("demand")
    show(document, document["items"], _COLUMNS, lambda row: str(row["source"]), output)
