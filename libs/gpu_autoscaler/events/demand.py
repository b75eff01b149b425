"""Reported demand: the public input for signals that are neither pods nor jobs.

Source: docs/decisions.md#scale-up-triggers.
"""

from typing import ClassVar

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.jobs import PRIORITY_DEFAULT
from gpu_autoscaler.model.observed import Instant


class DemandReported(Fact, frozen=True, kw_only=True):
    """A source reports demand for work that does not exist yet. The latest report of a source replaces earlier ones.

    The capacity is kept in addition to that of pods and jobs; once the work exists, its source reports a smaller count.
    """

    IS_PUBLIC: ClassVar[bool] = True

    source: str  # the reporter, e.g. kafka-lag; a label value. One report per source
    shape: DemandShape  # of each member
    count: int | None  # members; 0: no demand any more; None: unknown, the previous report still applies
    until: Instant  # the report expires then unless it is renewed
    priority: str | int = PRIORITY_DEFAULT  # low, medium, high, or 0..1000 among reports; pods and jobs come first
    preemptible: bool = True  # may be spot capacity
    note: str = ""  # for people

    def entity(self) -> str | None:
        return f"demand/{self.source}"
