"""What somebody else's autoscaler did, and what ours would have done of the same work: for `observe`.

What they did is measured from nodes and pods alone, as nobody tells us of their machines. What ours would have done is
the same work played by `tools/rerun.py`; where the record cannot know, it is said what was assumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.words.wording import counted
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.events.node import NodeGone, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodObserved
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.tools.outcome import Machine, Outcome, Work, measure, summed
from gpu_autoscaler.tools.recording import Recording
from gpu_autoscaler.tools.rerun import rerun
from gpu_autoscaler.tools.script import Arrival, is_foreign_work, is_serving, script_of

_IMAGE = "observed"  # nothing is pulled in the model


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Both fleets over the same time."""

    theirs: Outcome
    ours: Outcome  # modelled
    assumed: tuple[str, ...]  # in sentences


class _Pod(msgspec.Struct):
    """A pod's life. Its last observation says all but when it went."""

    last: PodObserved
    gone_at: datetime | None = None

    @property
    def ended_at(self) -> datetime | None:
        return self.last.finished_at or self.gone_at


def observed(recording: Recording, policy: ScalingPolicy, roles: Roles) -> Observed:
    """Return both. Raises ConfigError where nothing is for sale or no GPU was asked for in the record."""
    head = recording.head
    script = script_of(recording, is_serving)
    if not script.prices:
        raise ConfigError(
            "observe", ["no price list has come yet (spot.offers_sampled); wait, or name one by --offers"]
        )
    offers = {offer.key: offer for offer in script.prices[-1].offers}
    pods = [pod for pod in _pods(recording) if is_foreign_work(pod.last)]
    machines = tuple(_machines(recording, offers))
    working = [pod for pod in pods if not is_serving(pod.last)]
    arrivals = tuple(sorted((_arrival(pod, head.from_at) for pod in working), key=lambda one: one.at))
    if not arrivals and not script.replicas:
        raise ConfigError("observe", ["no pod has asked for a GPU yet; there is nothing to compare"])
    played = rerun(replace(script, arrivals=arrivals), policy, roles)
    return Observed(
        theirs=summed(machines, map(_work, working), 0, head.from_at, head.to_at),
        ours=measure(played.facts, head.from_at, head.to_at),
        assumed=tuple(_assumed(pods, machines, offers, played.modelled)),
    )


def _pods(recording: Recording) -> list[_Pod]:
    before = recording.head.state.pods.values()  # who ran before the window of the record begins
    pods: dict[PodUid, _Pod] = {pod.pod_uid: _Pod(pod) for pod in before if pod.job_id is None}
    for each in recording.facts:
        fact = each.recorded.fact
        if isinstance(fact, PodObserved) and fact.job_id is None:
            known = pods.get(fact.pod_uid)
            if known is None:
                pods[fact.pod_uid] = _Pod(fact)
            elif known.last.version < fact.version:
                known.last = fact
        elif isinstance(fact, PodGone) and (pod := pods.get(fact.pod_uid)) is not None:
            pod.gone_at = pod.gone_at or each.at
    return list(pods.values())


def _work(pod: _Pod) -> Work:
    return Work(priority=None, queued_at=pod.last.created_at, started_at=pod.last.started_at, finished_at=pod.ended_at)


def _arrival(pod: _Pod, from_at: datetime) -> Arrival:
    """The pod as a job of ours, for as long as it ran; one that never ran, or runs still, stays to the end."""
    seen = pod.last
    run_seconds = None
    if seen.started_at is not None and pod.ended_at is not None:
        run_seconds = max(1.0, (pod.ended_at - max(seen.started_at, from_at)).total_seconds())
    needs = seen.requests
    request = JobRequested(
        job_id=JobId(f"pod-{seen.pod_uid}"),
        job_name=seen.name,
        project_id=seen.namespace,
        gpu_requirements=GpuRequirements(gpu_count=needs.gpu_count, gpu_type=seen.gpu_model),
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
        at=max(seen.created_at, from_at), request=request, cancelled_at=pod.ended_at if is_withdrawn else None
    )


def _machines(recording: Recording, offers: Mapping[str, Offer]) -> Iterator[Machine]:
    """Nodes with GPUs, from their registration to their end, at the price of the list."""
    sold_with_gpus = {offer.instance_type for offer in offers.values() if offer.resources.gpu_count}
    last: dict[NodeUid, NodeObserved] = dict(recording.head.state.nodes)
    gone: dict[NodeUid, datetime] = {}
    for each in recording.facts:
        fact = each.recorded.fact
        if isinstance(fact, NodeObserved):
            known = last.get(fact.node_uid)
            if known is None or known.version < fact.version:
                last[fact.node_uid] = fact
        elif isinstance(fact, NodeGone):
            gone.setdefault(fact.node_uid, each.at)
    for uid, node in last.items():
        if node.allocatable.gpu_count or node.instance_type in sold_with_gpus:
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


def _assumed(
    pods: Sequence[_Pod], machines: Sequence[Machine], offers: Mapping[str, Offer], modelled: Mapping[str, int]
) -> Iterator[str]:
    yield f"prices: the list of {counted(len(offers), 'offer')} that was read; a node costs from its registration on"
    unknown_count = sum(machine.price_micro_usd_per_hour is None for machine in machines)
    if unknown_count:
        yield f"{counted(unknown_count, 'node')} of theirs is not in the list and costs nothing in their sum"
    yield "a node whose labels do not say how it was bought is taken for on-demand"
    yield "boot times of ours: what each offer says; everything that is for sale is taken to be available"
    yield "a pod is taken to run as long for us as it ran for them; one that runs still runs to the end"
    demanding_count = sum(bool(pod.last.demands.node_selector or pod.last.demands.node_affinity) for pod in pods)
    if demanding_count:
        yield f"selectors and affinities of {counted(demanding_count, 'pod')} are left out, but for the GPU model"
    yield "Kubernetes, boots and drains of ours are the simulator's; it begins without a machine"
    for what, count in sorted(modelled.items()):
        yield f"{count} x {what}"
