"""What did another autoscaler do, and what would ours have done with the same work? For `observe`.

Their outcome is measured from nodes and pods alone, because their instances are not visible. Ours is the same work
simulated by `replay/counterfactual.py`; assumptions are listed. `Window` keeps the latest facts of an observed cluster
and folds older ones into a state, so that memory stays bounded over weeks.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.format import counted
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.replay.counterfactual import rerun
from gpu_autoscaler.replay.outcome import Machine, Outcome, Work, measure, outcome_of
from gpu_autoscaler.replay.recording import Head, Recording
from gpu_autoscaler.replay.workload_script import Arrival, is_foreign_work, is_serving, script_of
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler.sim.adapters.assembly import Roles

_IMAGE = "observed"  # no image is pulled in the simulation


class FleetComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of both fleets over the same interval."""

    theirs: Outcome
    ours: Outcome  # modeled
    assumptions: tuple[str, ...]  # as sentences


class _Pod(msgspec.Struct):
    """The last observation of a pod, and its deletion time."""

    last: PodObserved
    gone_at: datetime | None = None

    @property
    def ended_at(self) -> datetime | None:
        return self.last.finished_at or self.gone_at


def compare_fleets(recording: Recording, policy: ScalingPolicy, roles: Roles) -> FleetComparison:
    """Compare the fleets. Raises ConfigError if the recording has no price list or no GPU request."""
    head = recording.head
    script = script_of(recording, is_serving)
    if not script.prices:
        raise ConfigError(
            "observe", ["no price list received yet (spot.offers_sampled); wait, or give one with --offers"]
        )
    offers = {offer.key: offer for offer in script.prices[-1].offers}
    pods = [pod for pod in _pods(recording) if is_foreign_work(pod.last)]
    machines = tuple(_machines(recording, offers))
    working = [pod for pod in pods if not is_serving(pod.last)]
    arrivals = tuple(sorted((_arrival(pod, head.from_at) for pod in working), key=lambda arrival: arrival.at))
    if not arrivals and not script.replicas:
        raise ConfigError("observe", ["no pod has requested a GPU yet, so there is nothing to compare; wait"])
    simulated = rerun(replace(script, arrivals=arrivals), policy, roles)
    return FleetComparison(
        theirs=outcome_of(machines, map(_work, working), 0, head.from_at, head.to_at),
        ours=measure(simulated.facts, head.from_at, head.to_at),
        assumptions=tuple(_assumptions(pods, machines, offers, simulated.modeled)),
    )


def _pods(recording: Recording) -> list[_Pod]:
    before = recording.head.state.pods.values()  # pods from before the start of the recording
    pods: dict[PodUid, _Pod] = {pod.pod_uid: _Pod(pod) for pod in before if pod.job_id is None}
    for stored in recording.facts:
        fact = stored.recorded.fact
        if isinstance(fact, PodObserved) and fact.job_id is None:
            known = pods.get(fact.pod_uid)
            if known is None:
                pods[fact.pod_uid] = _Pod(fact)
            elif known.last.version < fact.version:
                known.last = fact
        elif isinstance(fact, PodGone) and (pod := pods.get(fact.pod_uid)) is not None:
            pod.gone_at = pod.gone_at or stored.at
    return list(pods.values())


def _work(pod: _Pod) -> Work:
    return Work(priority=None, queued_at=pod.last.created_at, started_at=pod.last.started_at, finished_at=pod.ended_at)


def _arrival(pod: _Pod, from_at: datetime) -> Arrival:
    """Return the pod as a job with its run time; a pod that never ran or still runs lasts to the end."""
    last = pod.last
    run_seconds = None
    if last.started_at is not None and pod.ended_at is not None:
        run_seconds = max(1.0, (pod.ended_at - max(last.started_at, from_at)).total_seconds())
    needs = last.requests
    request = JobRequested(
        job_id=JobId(f"pod-{last.pod_uid}"),
        job_name=last.name,
        project_id=last.namespace,
        gpu_requirements=GpuRequirements(gpu_count=needs.gpu_count, gpu_type=last.gpu_model),
        container=ContainerRequest(image=_IMAGE),
        resources=ResourceRequest(
            cpu=f"{needs.cpu_milli}m",
            memory=str(needs.memory_bytes),
            ephemeral_storage=str(needs.ephemeral_storage_bytes),
        ),
        run_seconds=run_seconds,
    )
    is_withdrawn = run_seconds is None and pod.ended_at is not None
    return Arrival(
        at=max(last.created_at, from_at), request=request, cancelled_at=pod.ended_at if is_withdrawn else None
    )


def _machines(recording: Recording, offers: Mapping[str, Offer]) -> Iterator[Machine]:
    """Yield GPU nodes from registration to deletion, at the list price."""
    gpu_instance_types = {offer.instance_type for offer in offers.values() if offer.resources.gpu_count}
    last: dict[NodeUid, NodeObserved] = dict(recording.head.state.nodes)
    gone: dict[NodeUid, datetime] = {}
    for stored in recording.facts:
        fact = stored.recorded.fact
        if isinstance(fact, NodeObserved):
            known = last.get(fact.node_uid)
            if known is None or known.version < fact.version:
                last[fact.node_uid] = fact
        elif isinstance(fact, NodeGone):
            gone.setdefault(fact.node_uid, stored.at)
    for uid, node in last.items():
        if node.allocatable.gpu_count or node.instance_type in gpu_instance_types:
            yield Machine(from_at=node.created_at, to_at=gone.get(uid), price_micro_usd_per_hour=_price(node, offers))


def _price(node: NodeObserved, offers: Mapping[str, Offer]) -> int | None:
    capacity_type = node.capacity_type or CapacityType.ON_DEMAND
    return next(
        (
            offer.price_micro_usd_per_hour
            for offer in offers.values()
            if (offer.instance_type, offer.zone, offer.capacity_type) == (node.instance_type, node.zone, capacity_type)
        ),
        None,
    )


def _assumptions(
    pods: Sequence[_Pod], machines: Sequence[Machine], offers: Mapping[str, Offer], modeled: Mapping[str, int]
) -> Iterator[str]:
    yield f"prices: a list of {counted(len(offers), 'offer')}; a node is billed from its registration"
    unknown_count = sum(machine.price_micro_usd_per_hour is None for machine in machines)
    if unknown_count:
        yield f"{counted(unknown_count, 'node')} of theirs without a list price: not included in their cost"
    yield "a node without a capacity-type label is assumed on-demand"
    yield "our boot times are those of the offers; all offers are assumed available"
    yield "a pod runs as long as observed; a pod that still runs lasts to the end of the interval"
    demanding_count = sum(bool(pod.last.demands.node_selector or pod.last.demands.node_affinity) for pod in pods)
    if demanding_count:
        yield f"selectors and affinities of {counted(demanding_count, 'pod')} are ignored, except the GPU model"
    yield "our Kubernetes, boots and drains are simulated; the simulation begins without nodes"
    for description, count in sorted(modeled.items()):
        yield f"{count} x {description}"


FACTS_COUNT_MAX = 200_000  # about 2 kB per fact (measured, decoded pod.observed), so 400 MB
_DROPPED_RATIO = 0.25  # of the maximum, dropped at once: folding a few facts at a time is more expensive


class Window:
    """Facts since `from_at`, at most `facts_count_max` of them; older ones are folded into a state."""

    def __init__(self, from_at: datetime, facts_count_max: int = FACTS_COUNT_MAX) -> None:
        """Each offer of a price list counts as a fact, unless the list equals the previous one."""
        assert facts_count_max > 0, "a window without facts shows nothing"  # noqa: S101 - checked by the command
        self.from_at = from_at
        self.facts_count_max = facts_count_max
        self.facts_count = 0
        self._facts: list[tuple[Stored, int]] = []  # each with its count
        self._before: ClusterState = EMPTY_STATE
        self._sequences: dict[str, int] = {}
        self._prices: tuple[Offer, ...] = ()

    def add(self, recorded: Recorded, at: datetime) -> bool:
        """Add a fact; return True if the oldest ones were dropped."""
        recorded, count = self._shared(recorded)
        self._facts.append((Stored(at=at, recorded=recorded), count))
        self.facts_count += count
        is_full = self.facts_count > self.facts_count_max
        if is_full:
            self._drop()
        return is_full

    def recording(self, policy: ScalingPolicy, to_at: datetime) -> Recording:
        """Return the kept facts in the order in which they were stored."""
        head = Head(
            policy=policy, from_at=self.from_at, to_at=to_at, sequences=dict(self._sequences), state=self._before
        )
        return Recording(head=head, facts=tuple(stored for stored, _ in sorted(self._facts, key=_order)))

    def _drop(self) -> None:
        """Drop the facts that were stored first. Streams are read concurrently, so arrival order does not tell."""
        facts, number = sorted(self._facts, key=_order), 0
        while number < len(facts) and self.facts_count > self.facts_count_max * (1.0 - _DROPPED_RATIO):
            self.facts_count -= facts[number][1]
            number += 1
        dropped, self._facts = [stored for stored, _ in facts[:number]], facts[number:]
        self._before = fold(self._before, [stored.recorded for stored in dropped])
        for stored in dropped:
            stream, sequence = stored.recorded.stream, stored.recorded.sequence
            self._sequences[stream] = max(sequence, self._sequences.get(stream, 0))
        self.from_at = max(self.from_at, dropped[-1].at)

    def _shared(self, recorded: Recorded) -> tuple[Recorded, int]:
        """Return the fact and its count. Equal price lists, which are frequent and long, share memory."""
        fact = recorded.fact
        if not isinstance(fact, SpotOffersSampled):
            return recorded, 1
        if fact.offers != self._prices:
            self._prices = fact.offers
            return recorded, 1 + len(fact.offers)
        shared = replace(recorded.envelope, fact=replace(fact, offers=self._prices))
        return replace(recorded, envelope=shared), 1


def _order(item: tuple[Stored, int]) -> tuple[datetime, str, int]:
    return item[0].at, item[0].recorded.stream, item[0].recorded.sequence
