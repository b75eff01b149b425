"""Facts about capacity that somebody wants: the public door for signals that are neither pods nor jobs (S53)."""

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.jobs import PRIORITY_DEFAULT
from gpu_autoscaler.model.observed import Instant


class DemandReported(Fact, frozen=True, kw_only=True):
    """Somebody wants room to be free for work that is not here yet. The last word of a source counts.

    The room is kept besides what pods and jobs take; once the work has come as pods, its source says a smaller count.
    """

    source: str  # who says it, e.g. kafka-lag; a label's value. One source has one wish
    shape: DemandShape  # of each member
    count: int | None  # members with free room; 0: none is needed any more; None: not known now, the last word stands
    until: Instant  # the wish is forgotten then, unless it is said again
    priority: str | int = PRIORITY_DEFAULT  # low, medium, high, or 0..1000; among wishes: pods and jobs come first
    preemptible: bool = True  # may be spot capacity
    note: str = ""  # for people

    def entity(self) -> str | None:
        """The wish."""
        return f"demand/{self.source}"
