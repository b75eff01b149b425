"""Judges what the soak left behind. Pure: evidence in, sentences out.

A difference is a disagreement between the oracle and a service, a bill or an object; a broken promise is anything else
that must not happen. Both fail the soak.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.state.queries import listed_instances
from gpu_autoscaler.core.state.retention import order_ended_at
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.format import listed
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.sim.invariants.readability import living_differences
from gpu_autoscaler.simcluster.instances import InvoiceLine
from gpu_autoscaler.store.protocol import LastCharge
from gpu_autoscaler_services.cost_tracker.service import SPAN_SECONDS_MAX

SHOWN_COUNT_MAX = 3
# A span ends at the last list that has the instance; a killed tracker and broker add to its age.
CHARGE_AGE_SECONDS_MAX = SPAN_SECONDS_MAX + 240.0
# Until memory is level an allocator, a cache of code and the first plans settle; a leak of a megabyte a minute exceeds
# this within an hour at 1,000 nodes.
RSS_RATIO_MAX, RSS_MIB_SLACK = 1.25, 60.0
DISK_RATIO_MAX, DISK_MIB_SLACK = 1.5, 256.0


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a service, and that of the oracle at the same cut."""

    name: str
    oracle: ClusterState
    actual: ClusterState
    folds: Collection[type[Fact]]


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """What exists in simcluster now."""

    pods: Mapping[str, str | None]  # uid of each pod that has not ended: its node, None: waiting
    nodes: Collection[str]  # uids
    jobs: Collection[str]  # ids of our jobs whose Kubernetes Jobs have not ended
    instances: Collection[str]  # provider ids of machines that are not terminated


class Span(NamedTuple):
    """A charged time of an instance."""

    from_at: datetime
    to_at: datetime
    micro_usd: int


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in the first half of the measured time (its maximum), and at the end."""

    start: float
    end: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is judged."""

    known: Sequence[Known]
    state: ClusterState  # the oracle's, of everything
    objects: Objects
    invoice: Sequence[InvoiceLine]
    charges: Mapping[str, LastCharge]  # of the ledger
    spans: Mapping[str, Sequence[Span]]  # published or to be published, by provider id; each once, by their starts
    judged_at: datetime
    rss_mib: Mapping[str, Level]
    disk_mib: Level
    # Limits of heaps, where memory moves between processes: the next leader of a stream holds what the last one held.
    rss_mib_max: Mapping[str, int] = {}
    broken: Sequence[str] = ()  # found elsewhere


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `differences` and `broken` are empty if everything is as it must be."""

    differences: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """True without differences."""
        return not self.differences


def judge(evidence: Evidence) -> Verdict:
    """Return every difference and every broken promise."""
    return Verdict(
        differences=(
            *(line for known in evidence.known for line in state_differences(known)),
            *bill_differences(evidence),
            *work_differences(evidence.state, evidence.objects),
        ),
        broken=(*evidence.broken, *_launched_once(evidence.invoice), *_memory(evidence), *_disk(evidence.disk_mib)),
    )


def _memory(evidence: Evidence) -> Iterator[str]:
    for name, level in sorted(evidence.rss_mib.items()):
        limit_mib = evidence.rss_mib_max.get(name)
        if limit_mib is None and level.end > level.start * RSS_RATIO_MAX + RSS_MIB_SLACK:
            yield f"memory of {name} is not level: {level.start:.0f} MiB became {level.end:.0f}"
        if limit_mib is not None and level.end > limit_mib * RSS_RATIO_MAX:
            yield f"memory of {name} is {level.end:.0f} MiB, its limit is {limit_mib}"


def _disk(level: Level) -> Iterator[str]:
    if level.end > level.start * DISK_RATIO_MAX + DISK_MIB_SLACK:
        yield f"disk is not level: {level.start:.0f} MiB became {level.end:.0f}"


def state_differences(known: Known) -> Iterator[str]:
    """Yield what the service does not know although it lives, and what it takes for alive although it has ended."""
    for line in living_differences(known.oracle, known.actual, known.folds):
        yield f"{known.name}: {line}"
    for line in living_differences(known.actual, known.oracle, known.folds):
        yield f"oracle, compared with {known.name}: {line}"


def bill_differences(evidence: Evidence) -> Iterator[str]:
    """Yield each instance whose charge is not what the provider bills up to the end of its last span."""
    invoiced = {line.provider_id: line for line in evidence.invoice}
    ledger = evidence.charges
    wrong = [text for line in evidence.invoice if (text := _bill_error(line, ledger.get(line.provider_id), evidence))]
    yield from _some(wrong, "bills")
    yield from _some(
        [f"{provider_id} is charged, but not on the invoice" for provider_id in sorted(set(ledger) - set(invoiced))],
        "bills",
    )
    yield from _some(
        [
            f"{provider_id}: facts say {charged} micro-USD, the ledger {charge.total_micro_usd}"
            for provider_id, charge in sorted(ledger.items())
            if (charged := sum(span.micro_usd for span in evidence.spans.get(provider_id, ())))
            != charge.total_micro_usd
        ],
        "bills in facts",
    )
    yield from _some(
        [
            f"{provider_id} is charged up to {before.to_at:%H:%M:%S}, and then from {after.from_at:%H:%M:%S} on"
            for provider_id, spans in sorted(evidence.spans.items())
            for before, after in pairwise(spans)
            if before.to_at != after.from_at
        ],
        "spans",
    )


def _bill_error(line: InvoiceLine, charge: LastCharge | None, evidence: Evidence) -> str | None:
    age_max = timedelta(seconds=CHARGE_AGE_SECONDS_MAX)
    due_since = line.terminated_at or line.launched_at
    if charge is None:
        is_due = evidence.judged_at - due_since > age_max
        return f"{line.provider_id} is not charged at all" if is_due else None
    until = charge.last.to_at
    expected = cost_micro_usd(line.price_micro_usd_per_hour, until - line.launched_at)
    if charge.total_micro_usd != expected:
        return (
            f"{line.provider_id} is charged {charge.total_micro_usd} micro-USD up to {until:%H:%M:%S}, "
            f"the provider bills {expected}"
        )
    end = line.terminated_at
    if end is not None and until > end:
        return f"{line.provider_id} is charged up to {until:%H:%M:%S}, it ended at {end:%H:%M:%S}"
    if until != end and evidence.judged_at - (end or until) > age_max:
        ran = "runs" if end is None else f"ran until {end:%H:%M:%S}"
        return f"{line.provider_id} is charged up to {until:%H:%M:%S} only, it {ran}"
    return None


def work_differences(state: ClusterState, objects: Objects) -> Iterator[str]:
    """Yield disagreements about open work and what it runs on."""
    pods = {str(uid): pod.node_name for uid, pod in state.pods.items() if pod.phase in ("pending", "running")}
    yield from _sets("pods", pods.keys(), objects.pods.keys())
    moved = [uid for uid in pods.keys() & objects.pods.keys() if pods[uid] != objects.pods[uid]]
    yield from _some([f"pod {uid} is on {objects.pods[uid]}, not on {pods[uid]}" for uid in sorted(moved)], "pods")
    yield from _sets("nodes", map(str, state.nodes), objects.nodes)
    jobs = {str(key) for key, job in state.jobs.items() if job.queued is not None and job.finished is None}
    yield from _sets("jobs", jobs, objects.jobs)
    listed_now = (
        frozenset[ProviderId]()
        if state.instances_listed_at is None
        else listed_instances(state.instances_seen_at, state.instances_listed_at)
    )
    alive = {
        str(key) for key in listed_now if (known := state.instances.get(key)) is None or known.state != "terminated"
    }
    yield from _sets("instances", alive, objects.instances)
    launched = {
        str(order.launched.provider_id): order.action_id
        for order in state.orders.values()
        if order.launched is not None and order_ended_at(order) is None
    }
    lost = sorted(launched.keys() - set(objects.instances))
    yield from _some([f"order {launched[key]} is open, its instance {key} is gone" for key in lost], "orders")


def _sets(what: str, known: Collection[str] | Iterator[str], existing: Collection[str]) -> Iterator[str]:
    known, existing = set(known), set(existing)
    for names, text in ((existing - known, "exist but are unknown"), (known - existing, "are known but do not exist")):
        if names:
            yield f"{len(names)} {what} {text}: {listed(sorted(names)[:SHOWN_COUNT_MAX])}"


def _launched_once(lines: Sequence[InvoiceLine]) -> Iterator[str]:
    counts = Counter(line.action_id for line in lines if line.action_id is not None)
    for action_id, count in sorted(counts.items()):
        if count > 1:
            yield f"action {action_id} launched {count} instances"


def _some(lines: Sequence[str], what: str) -> Iterator[str]:
    """Yield the first few lines, and how many there are in all."""
    yield from lines[:SHOWN_COUNT_MAX]
    if len(lines) > SHOWN_COUNT_MAX:
        yield f"{len(lines)} differences in {what} in all"
