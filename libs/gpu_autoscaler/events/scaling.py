"""Facts about the size of the cluster: plans, and each step of executing them.

Steps of one action are ordered by `STEP`, so that repeated and late facts change nothing.
"""

from typing import ClassVar, Literal

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, Cut, DrainNode, PastDecision, Plan, ReleaseInstance
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped
from gpu_autoscaler.model.resources import Resources, Slices


class ScalingPlanMade(Fact, frozen=True, kw_only=True):
    """A plan was accepted by the stream: no other plan has the same parent."""

    plan_id: PlanId
    plan: Plan
    cut: Cut
    policy_digest: str
    core_digest: str
    service_version: str = ""

    def condition(self) -> str | None:
        """One fact per plan."""
        return f"plan/{self.plan_id}"

    def entity(self) -> str | None:
        return f"plan/{self.plan_id}"


class ScalingDecisionsRestored(Fact, frozen=True, kw_only=True):
    """The stream was lost: these earlier decisions were still open, by the store of record, Kubernetes and the cloud.

    Published once, before the first plan, also without open decisions. Their execution continues under their tokens.
    """

    past: tuple[PastDecision, ...]  # the open decisions; may be empty
    restored_at: Instant  # when they were restored
    brake: BrakeTripped | None = None  # of the last plan; None: it had not tripped


class _Step(Fact, frozen=True, kw_only=True):
    """Base of the steps of one action; a step happens once."""

    STEP: ClassVar[int] = 0

    action_id: ActionId
    plan_id: PlanId

    def condition(self) -> str | None:
        """One fact per step and action."""
        return f"{self.subject_root()}/{self.action_id}"

    def entity(self) -> str | None:
        return f"action/{self.action_id}"


# ---- buying


class ScalingNodeOrdered(_Step, frozen=True, kw_only=True):
    """The order is about to be placed with the cloud, under the token of the action."""

    STEP: ClassVar[int] = 1

    pool: str
    offer: Offer
    deadline_at: Instant  # not usable by then: released
    labels: tuple[tuple[str, str], ...] = ()  # of the node, as the order requires them
    gang: str | None = None
    slices: Slices = ()  # what its GPUs are cut into; none: they stay whole

    @property
    def promised(self) -> Resources:
        """The capacity of the node for pods."""
        return self.offer.cut_into(self.slices)


class ScalingNodeLaunched(_Step, frozen=True, kw_only=True):
    """The cloud launched the instance; it is billed from `launched_at`."""

    STEP: ClassVar[int] = 2

    provider_id: ProviderId
    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_micro_usd_per_hour: int | None  # from the response of the cloud; None if unknown
    launched_at: Instant  # billing starts


class ScalingLaunchRefused(_Step, frozen=True, kw_only=True):
    """The cloud refused the launch; there is no instance. The offer is unavailable for the next plans."""

    STEP: ClassVar[int] = 2

    offer: Offer
    code: str  # the error code of the cloud, e.g. InsufficientInstanceCapacity
    message: str  # error message of the cloud
    scope: Literal["offer", "zone", "region"]  # how far the refusal reaches
    refused_at: Instant  # when the cloud refused it
    retry_at: Instant  # end of the back-off


# ---- removing


class ScalingDrainStarted(_Step, frozen=True, kw_only=True):
    """The node is cordoned: no new pod is scheduled on it."""

    STEP: ClassVar[int] = 1

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId | None
    is_voluntary: bool  # it stops at budgets and protections; else the deadline forces it
    deadline_at: Instant  # pods that are left are deleted then; a voluntary drain is abandoned
    started_at: Instant


class ScalingCheckpointRequested(_Step, frozen=True, kw_only=True):
    """Pods were asked, by annotation, to save a checkpoint by the deadline: those of a node to be removed, or of a
    job."""

    STEP: ClassVar[int] = 1

    node_name: str  # empty: the pods of a job, on any node
    pods: tuple[str, ...]  # namespace/name, sorted
    job_ids: tuple[JobId, ...]  # whose pods these are, sorted
    deadline_at: Instant  # a later save is not waited for
    requested_at: Instant


class ScalingPodEvicted(Fact, frozen=True, kw_only=True):
    """A pod was evicted; `pod.gone` follows once Kubernetes has deleted it."""

    action_id: ActionId
    plan_id: PlanId
    node_name: str
    pod_uid: PodUid
    pod: str  # namespace/name
    is_forced: bool  # deleted at the deadline instead of evicted
    evicted_at: Instant  # when Kubernetes accepted the eviction

    def condition(self) -> str | None:
        """One fact per action and pod; a forced deletion is another."""
        return f"pod_evicted/{self.action_id}/{self.pod_uid}/{self.is_forced}"

    def entity(self) -> str | None:
        return f"pod/{self.pod_uid}"


class ScalingNodeDrained(_Step, frozen=True, kw_only=True):
    """No pod that counts is left on the node."""

    STEP: ClassVar[int] = 2

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId | None
    drained_at: Instant  # when the last of them was gone


class ScalingDrainCancelled(_Step, frozen=True, kw_only=True):
    """The node is uncordoned and stays. `drain_action_id` is the drain that ended."""

    STEP: ClassVar[int] = 2

    drain_action_id: ActionId
    node_uid: NodeUid
    node_name: str
    cancelled_at: Instant  # when the node was uncordoned
    abandoned_because: str = ""  # what blocked the drain; empty: a plan canceled it


class ScalingNodeTerminated(_Step, frozen=True, kw_only=True):
    """The cloud confirmed that the instance is terminated or never existed; billing ended at `terminated_at`."""

    STEP: ClassVar[int] = 3

    provider_id: ProviderId | None  # None: the order never became an instance
    order_action_id: ActionId | None  # the order that bought it; None: unknown
    node_name: str | None
    terminated_at: Instant  # billing ended


class ScalingNodeRemoved(Fact, frozen=True, kw_only=True):
    """We deleted the Kubernetes node object: the cloud had confirmed that exactly its instance is terminated."""

    node_uid: NodeUid
    node_name: str
    provider_id: ProviderId
    asked_at: Instant  # when the cloud first confirmed the termination
    removed_at: Instant  # after a second confirmation

    def condition(self) -> str | None:
        """One fact per node object."""
        return f"{self.subject_root()}/{self.node_uid}"

    def entity(self) -> str | None:
        return f"node/{self.node_uid}"


# ---- resync: what is still open, before the stream discards its first facts


class ScalingOrderResynced(Fact, frozen=True, kw_only=True):
    """A purchase whose instance may live, or is not charged to its end: its decision and its steps so far.

    Nothing is executed because of it.
    """

    action_id: ActionId
    plan_id: PlanId
    decision: BuyNode | None = None  # the purchase; None: unknown
    planned_at: Instant | None = None
    ordered: ScalingNodeOrdered | None = None  # its order; None: not ordered yet
    launched: ScalingNodeLaunched | None = None  # its launch; None: not launched yet
    terminated: ScalingNodeTerminated | None = None  # None: not terminated, or an older release, which never set it

    def entity(self) -> str | None:
        return f"action/{self.action_id}"


class ScalingDrainResynced(Fact, frozen=True, kw_only=True):
    """A removal under way, or one by force within the last hour: its decision and its steps so far.

    One that is under way continues by it when the stream has discarded the facts of its steps.
    """

    action_id: ActionId
    plan_id: PlanId
    decision: DrainNode | ReleaseInstance | None = None  # the removal; None: unknown
    planned_at: Instant | None = None
    started: ScalingDrainStarted | None = None  # its start; None: not started yet
    drained: ScalingNodeDrained | None = None  # its end; None: not drained yet
    cancel: CancelDrain | None = None  # the decision that cancels it; None: none
    cancelled: ScalingDrainCancelled | None = None  # its cancellation; None: it was not canceled
    terminated: ScalingNodeTerminated | None = None  # termination of the instance; None: not terminated yet

    def entity(self) -> str | None:
        return f"action/{self.action_id}"


# ---- forecast


class ScalingDemandSampled(Fact, frozen=True, kw_only=True):
    """GPUs requested in this minute by running and waiting work, by model; `any` for requests without a model."""

    minute: int  # since 1970
    gpu_counts: tuple[tuple[str, int], ...]  # sorted by model; missing models were not requested

    def condition(self) -> str | None:
        """One fact per minute."""
        return f"demand_sampled/{self.minute}"


class ScalingForecastScored(Fact, frozen=True, kw_only=True):
    """Accuracy of the forecast for one hour and GPU model."""

    kind: str  # GPU model, or any
    score: Score  # forecast and demand compared

    def condition(self) -> str | None:
        """One fact per hour and model."""
        return f"forecast_scored/{self.kind}/{self.score.hour}"
