"""The list of all facts, and their decoding. A new fact is one line in the union of its domain."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, get_args

import msgspec

from gpu_autoscaler.events import cost, demand, gpu, job, node, pod, policy, scaling, shadow, spot
from gpu_autoscaler.events.envelope import EVENT_ID_LENGTH_MAX, SPEC_VERSION, UNREADABLE, Envelope, Head, read_head
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.document_errors import all_errors
from gpu_autoscaler.model.errors import InvalidFact, UnknownType
from gpu_autoscaler.model.ids import FactId


class Upcast:
    """Converts the payload of `old_type` to `new_type`, one version up, by a pure function on its decoded object."""

    def __init__(self, old_type: str, new_type: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.old_type = old_type
        self.new_type = new_type
        self._change = change

    def lift(self, payload: bytes) -> tuple[str, bytes]:
        """Return the new type and payload. Raises InvalidFact for an invalid payload."""
        try:
            lifted = self._change(msgspec.json.decode(payload, type=dict[str, Any]))
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as exc:
            raise InvalidFact(f"cannot convert {self.old_type} to {self.new_type}: {exc!r}") from exc
        return self.new_type, msgspec.json.encode(lifted)


# No published fact has changed its meaning yet.
UPCASTS: Mapping[str, Upcast] = {}

OneJobFact = (
    job.JobRequested
    | job.JobCancelRequested
    | job.JobQueued
    | job.JobRejected
    | job.JobPlaced
    | job.JobPreempted
    | job.JobStarted
    | job.JobFinished
    | job.JobEstimated
    | job.JobEstimateScored
)
JobFact = OneJobFact | job.JobListed | job.JobResynced
PodFact = (
    pod.PodObserved
    | pod.PodGone
    | pod.PodListed
    | pod.PodWatched
    | pod.PodBudgetObserved
    | pod.PodBudgetGone
    | pod.PodBudgetListed
    | pod.PodQuotaObserved
    | pod.PodQuotaGone
    | pod.PodQuotaListed
    | pod.PodProvisioningObserved
    | pod.PodProvisioningGone
    | pod.PodProvisioningListed
)
NodeFact = (
    node.NodeObserved
    | node.NodeGone
    | node.NodeListed
    | node.NodeWatched
    | node.NodeInstanceObserved
    | node.NodeInstanceListed
)
GpuFact = gpu.GpuNodeSampled | gpu.GpuNodeSummarized
SpotFact = spot.SpotNoticeReceived | spot.SpotNoticeWithdrawn | spot.SpotRebalanceRecommended | spot.SpotOffersSampled
ScalingFact = (
    scaling.ScalingPlanMade
    | scaling.ScalingDecisionsRestored
    | scaling.ScalingOrderResynced
    | scaling.ScalingDrainResynced
    | scaling.ScalingNodeOrdered
    | scaling.ScalingNodeLaunched
    | scaling.ScalingLaunchRefused
    | scaling.ScalingDrainStarted
    | scaling.ScalingCheckpointRequested
    | scaling.ScalingPodEvicted
    | scaling.ScalingNodeDrained
    | scaling.ScalingDrainCancelled
    | scaling.ScalingNodeTerminated
    | scaling.ScalingNodeRemoved
    | scaling.ScalingDemandSampled
    | scaling.ScalingForecastScored
)
CostFact = cost.CostAccrued | cost.CostBudgetCrossed | cost.CostLedgerReported
ShadowFact = shadow.ShadowPlanMade
DemandFact = demand.DemandReported
PolicyFact = (
    policy.PolicyDirectiveGiven | policy.PolicyDirectiveLifted | policy.PolicyChanged | policy.PolicyDocumentsAccepted
)

AnyFact = (
    JobFact | PodFact | NodeFact | GpuFact | SpotFact | ScalingFact | CostFact | ShadowFact | DemandFact | PolicyFact
)

# Every fact, in the order of the unions, which let the type checker prove that `fold` is exhaustive.
FACTS: tuple[type[Fact], ...] = get_args(AnyFact)
# What decisions are made from, without telemetry.
STATE_FACTS: tuple[type[Fact], ...] = get_args(
    JobFact | PodFact | NodeFact | SpotFact | ScalingFact | CostFact | DemandFact | PolicyFact
)
INSTANCE_FACTS: tuple[type[Fact], ...] = get_args(NodeFact | SpotFact | ScalingFact)


def _whole(fact: type[Fact]) -> type[Any]:
    """A struct for an event of this fact: `Head` with decoded data."""
    fields: list[tuple[str, Any, Any]] = [
        (field.name, field.type, msgspec.field() if field.required else field.default)
        for field in msgspec.structs.fields(Head)
        if field.name != "data"
    ]
    fields.append(("data", fact, msgspec.field()))
    return msgspec.defstruct(f"{fact.__name__}Event", fields, kw_only=True, gc=False)


class FactCatalog:
    """Decodes messages into facts. The default instance decodes FACTS; tests may add facts and upcasts."""

    def __init__(self, facts: Iterable[type[Fact]] = FACTS, upcasts: Mapping[str, Upcast] = UPCASTS) -> None:
        self.by_type = {fact.type_name(): fact for fact in facts}
        self._decoders = {name: msgspec.json.Decoder(fact) for name, fact in self.by_type.items()}
        self._upcasts = dict(upcasts)
        self.subject_roots = frozenset(fact.subject_root() for fact in self.by_type.values())
        # Subjects without a third token.
        self.plain = {fact.subject_root(): fact for fact in self.by_type.values() if fact.subject is Fact.subject}
        self._whole = {
            fact.subject_root(): (name, msgspec.json.Decoder(_whole(fact)))
            for name, fact in self.by_type.items()
            if name not in self._upcasts
        }

    def decode(self, message: bytes, *, arrived_at: Callable[[], datetime] | None = None) -> Envelope:
        """Return the envelope of a message. `arrived_at` dates an event without `time`.

        Raises UnknownType for an unknown type, InvalidFact naming the field for an invalid fact.
        """
        head = read_head(message)
        time = head.time or (arrived_at and arrived_at())
        if time is None:
            raise InvalidFact(f"event {head.id!r} of type {head.type!r} has no time")
        return Envelope(
            id=FactId(head.id),
            source=head.source,
            time=time,
            fact=self._fact(head),
            correlation_id=head.correlationid,
            causation_id=None if head.causationid is None else FactId(head.causationid),
        )

    def decode_on(
        self, subject_root: str, message: bytes, *, arrived_at: Callable[[], datetime] | None = None
    ) -> Envelope:
        """Like `decode`, but faster for a valid message of the type of this subject, which is decoded in one pass."""
        type_name, decoder = self._whole.get(subject_root, (None, None))
        if decoder is None:
            return self.decode(message, arrived_at=arrived_at)
        try:
            event = decoder.decode(message)
        except UNREADABLE:
            return self.decode(message, arrived_at=arrived_at)
        if (
            event.type != type_name
            or event.time is None
            or event.specversion != SPEC_VERSION
            or not 0 < len(event.id) <= EVENT_ID_LENGTH_MAX
        ):
            return self.decode(message, arrived_at=arrived_at)
        return Envelope(
            id=event.id,
            source=event.source,
            time=event.time,
            fact=event.data,
            correlation_id=event.correlationid,
            causation_id=event.causationid,
        )

    def _fact(self, head: Head) -> Fact:
        type_name, payload = head.type, bytes(head.data)
        # Several upcasts may follow each other; each raises the version, so the loop ends.
        while (upcast := self._upcasts.get(type_name)) is not None:
            type_name, payload = upcast.lift(payload)
        decoder = self._decoders.get(type_name)
        if decoder is None:
            raise UnknownType(f"event {head.id!r} has type {head.type!r}, which is unknown to this version")
        try:
            return decoder.decode(payload)
        except UNREADABLE as exc:
            reasons = all_errors(payload, self.by_type[type_name], exc)
            raise InvalidFact(f"event {head.id!r} is not a valid {type_name}: {reasons}") from exc


FACT_CATALOG = FactCatalog()
