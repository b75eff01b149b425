"""`gpu-autoscaler demand ...`: say how much room is to be free for work to come, and see what stands."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from cyclopts import App, Parameter

from gpu_autoscaler_services.cli.client import Document, Gateway
from gpu_autoscaler_services.cli.output import Columns, Output, show, words

HERE = Gateway()
HOUR_SECONDS = 3600.0

demand = App(name="demand", help="Ask for room to be free for work to come.", help_format="plaintext")

_COLUMNS: Columns = (
    ("SOURCE", lambda row: row["source"]),
    ("COUNT", lambda row: "unknown" if row["count"] is None else str(row["count"])),
    ("GPUS", lambda row: f"{row['shape']['gpu_count']} {row['shape']['gpu_type'] or ''}".strip()),
    ("PRIORITY", lambda row: row["priority"]),
    ("UNTIL", lambda row: row["until"][:19] + "Z"),
    ("MESSAGE", lambda row: row["message"] or row["note"]),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the flags add up to."""

    count: Annotated[int, Parameter(help="Members with free room; 0: none is needed any more.")]
    gpus: Annotated[int, Parameter(help="GPUs of each member.")]
    gpu_type: Annotated[str | None, Parameter(help="GPU model, e.g. A100; any when left out.")] = None
    cpu: Annotated[str, Parameter(help="CPU of each member, as a Kubernetes quantity.")] = "1"
    memory: Annotated[str, Parameter(help="Memory of each member, as a Kubernetes quantity.")] = "4Gi"
    seconds: Annotated[float, Parameter(help="For so long, in cluster time; say it again to go on.")] = HOUR_SECONDS
    priority: Annotated[str, Parameter(help="low, medium, high, or 0..1000; among wishes.")] = "medium"
    note: Annotated[str, Parameter(help="For people.")] = ""

    def body(self, source: str, now: datetime) -> Document:
        """The report, said at this instant of cluster time."""
        return {
            "source": source,
            "shape": {"gpu_count": self.gpus, "gpu_type": self.gpu_type, "cpu": self.cpu, "memory": self.memory},
            "count": self.count,
            "until": (now + timedelta(seconds=self.seconds)).isoformat(),
            "priority": int(self.priority) if self.priority.isdigit() else self.priority,
            "note": self.note,
        }


@demand.command
def report(source: str, /, *, wish: Wish, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Say how much room is to be free. The last word of a source counts.

    Pods and jobs come first, whatever the priority. When the work has come, say a smaller count.
    """
    now = datetime.fromisoformat(gateway.read("status")["as_of"])
    accepted = gateway.send("POST", "demand", wish.body(source, now))
    if output == "table":
        words("accepted; see what stands with: gpu-autoscaler demand list")
    show(accepted, [accepted], _COLUMNS, lambda row: str(row["source"]), output)


@demand.command(name="list")
def list_(*, gateway: Gateway = HERE, output: Output = "table") -> None:
    """Wishes that stand, and why there is no room for one yet."""
    document = gateway.read("demand")
    show(document, document["items"], _COLUMNS, lambda row: str(row["source"]), output)
