"""Why a node is drained, an instance is released, or a drain is canceled."""

from typing import Literal

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.format import (
    capitalized,
    counted,
    duration,
    instant,
    listed,
    money,
    percent,
    price,
    subject_name,
)
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import IdleRule, Reason, ReasonWithoutRemedy
from gpu_autoscaler.model.reasons.defer_limits import SpendPeriod, raise_spend_budget, spend_budget

# The steps of a node from order to usable, in this order.
BootStep = Literal["node", "kubelet", "gpus", "startup_taint", "unknown"]

# ---- why a node is drained


class NodeIdle(Reason, frozen=True, kw_only=True, tag="node_idle"):
    """No pod that counts ran on the node for longer than the policy allows."""

    idle_seconds: float
    idle_seconds_max: float
    rule: IdleRule | None = None  # None: of an earlier release

    def sentence(self) -> str:
        limit = duration(self.idle_seconds_max)
        idle = f"No pod has used the node for {duration(self.idle_seconds)}; an idle node is removed after {limit}."
        return idle if self.rule is None else f"{idle} {self.rule.sentence()}"

    def remedy(self) -> str:
        return "To keep idle nodes for another time, set idle_seconds of the policy or the pool."


class NodeUnderused(Reason, frozen=True, kw_only=True, tag="node_underused"):
    """Every pod of the node provably fits elsewhere and may be disrupted."""

    pods: tuple[PodUid, ...]
    saving_micro_usd_per_hour: int | None  # None: its price is unknown, and low utilization alone is the cause
    utilization_ratio: float | None = None  # if low GPU utilization is the cause; None: it is not

    def sentence(self) -> str:
        ratio, saving = self.utilization_ratio, self.saving_micro_usd_per_hour
        used = "" if ratio is None else f"GPU utilization of the node has stayed at {percent(ratio)}. "
        saved = "the saving is unknown" if saving is None else f"this saves {price(saving)}"
        return f"{used}{counted(len(self.pods), 'pod')} of the node can move to other nodes; {saved}."

    def remedy(self) -> str:
        return f"To keep a pod, annotate it {labels.DO_NOT_DISRUPT}=true; to stop it, set is_consolidation_on to false."


class NodeExpired(Reason, frozen=True, kw_only=True, tag="node_expired"):
    """The node is older than the policy allows."""

    age_seconds: float  # age of the node, in seconds
    age_seconds_max: float

    def sentence(self) -> str:
        return f"The node is {duration(self.age_seconds)} old; the maximum age is {duration(self.age_seconds_max)}."

    def remedy(self) -> str:
        return "To keep nodes longer, raise removal.expire_seconds_max."


class NodeDrifted(Reason, frozen=True, kw_only=True, tag="node_drifted"):
    """The node no longer matches the policy."""

    difference: str  # in words: "pool gpu no longer exists"

    def sentence(self) -> str:
        return f"The node no longer matches the policy: {self.difference}."

    def remedy(self) -> str:
        return "To keep drifted nodes, set removal.is_drift_on to false."


class NodeUnhealthy(Reason, frozen=True, kw_only=True, tag="node_unhealthy"):
    """The node has shown a fault for longer than the policy allows."""

    evidence: str  # in words: "GPU 3 reported XID 79"
    unhealthy_seconds: float  # time since the fault appeared
    unhealthy_seconds_max: float  # limit of the policy
    is_fatal: bool = True  # False: it still works, and is drained when its pods may be disrupted

    def sentence(self) -> str:
        since, limit = duration(self.unhealthy_seconds), duration(self.unhealthy_seconds_max)
        return f"The node is unhealthy: {self.evidence} for {since} (limit: {limit})."

    def remedy(self) -> str:
        return (
            "If such nodes recover by themselves, raise removal.unhealthy_seconds_max, or for GPU faults "
            "removal.gpu_health.evidence_seconds."
        )


class SpotReclaim(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="spot_reclaim"):
    """The cloud reclaims the instance."""

    notice_id: str
    kind: str  # what the cloud does to the instance: terminate, stop, hibernate, ...
    reclaim_at: Instant | None  # None: the notice carried no deadline

    def sentence(self) -> str:
        when = "soon" if self.reclaim_at is None else f"at {instant(self.reclaim_at)}"
        if self.kind == "paid_period_over":
            return f"The reservation of the instance ends {when}."
        return f"The cloud reclaims the instance {when} (notice: {self.kind})."


class NodeDeleted(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="node_deleted"):
    """The node object was deleted by hand; our finalizer holds it until the node is drained and its instance gone."""

    deleted_at: Instant

    def sentence(self) -> str:
        return f"The node object was deleted at {instant(self.deleted_at)}; its instance is terminated as well."


class RebalanceRecommended(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="rebalance_recommended"):
    """The cloud reports an elevated interruption risk, and all pods of the node are cheap to move."""

    noticed_at: Instant

    def sentence(self) -> str:
        at = instant(self.noticed_at)
        return f"The cloud reported an elevated interruption risk at {at}, and all pods of the node fit elsewhere."


class AboveOverride(Reason, frozen=True, kw_only=True, tag="above_override"):
    """The node is empty, and there are more nodes or GPUs than a temporary override allows."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_max: int

    def sentence(self) -> str:
        override = self.attribution.override("allows at most", self.count_max, self.unit, self.count)
        return f"The node is empty, and {override}."

    def remedy(self) -> str:
        return self.attribution.remedy()


class SpendExhausted(Reason, frozen=True, kw_only=True, tag="spend_exhausted"):
    """The running nodes would exceed a hard spend budget; this one costs least to lose."""

    owner: str  # whose budget it is: cluster, pool/<name>, zone/<name> or project/<name>
    period: SpendPeriod  # of the budget
    spent_micro_usd: int
    limit_micro_usd: int
    until: Instant  # the period's end

    def sentence(self) -> str:
        limit = spend_budget(self.owner, self.period, self.limit_micro_usd)
        spent = f"{money(self.spent_micro_usd)} spent"
        return f"The running nodes would exceed {limit} ({spent}); this node costs least to lose."

    def remedy(self) -> str:
        raised = raise_spend_budget(self.owner, self.period, self.limit_micro_usd)
        return f"{raised} To only stop purchases when the budget is used up, set its is_hard to false."


class BootTimedOut(Reason, frozen=True, kw_only=True, tag="boot_timed_out"):
    """Bought, but not usable by its deadline."""

    booting_seconds: float  # time since the order
    boot_seconds_max: float  # limit of the policy
    missing_step: BootStep = "unknown"  # the first step that was not reached
    detail: str = ""  # of that step: what is there instead

    def sentence(self) -> str:
        late = (
            f"The node was not usable {duration(self.booting_seconds)} after its order "
            f"(limit: {duration(self.boot_seconds_max)})"
        )
        match self.missing_step:
            case "node":
                return f"{late}: no node registered."
            case "kubelet":
                return f"{late}: the node registered but never became ready."
            case "gpus":
                return f"{late}: the node is ready with {self.detail}."
            case "startup_taint":
                return f"{late}: startup taint {self.detail} was not removed."
            case "unknown":
                return f"{late}."

    def remedy(self) -> str:
        match self.missing_step:
            case "node":
                return "Check the instance's console output, its user data and its network route to the API server."
            case "kubelet":
                return "Check the conditions of the node and the pods of its network agent."
            case "gpus":
                return "Check the pods of the GPU driver and of the device plugin on the node."
            case "startup_taint":
                return "Check the component that is to remove the startup taint."
            case "unknown":
                return "If nodes of this instance type boot slower than that, raise boot_seconds_max."


# ---- why an instance is released


class NodeLost(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="node_lost"):
    """The Kubernetes node of the instance was deleted, so that no work can reach the instance."""

    def sentence(self) -> str:
        return "The Kubernetes node of the instance was deleted, so no pod can run on the instance."


class NodeOrphaned(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="node_orphaned"):
    """An instance carries our tag, and no recorded decision accounts for it."""

    seen_seconds: float  # time since it was first listed

    def sentence(self) -> str:
        seen = duration(self.seen_seconds)
        return f"The instance carries our tag, but no recorded decision bought it; it has been visible for {seen}."


class GangAbandoned(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="gang_abandoned"):
    """Bought for a gang that cannot be completed now, and needed by nothing else."""

    gang: str  # key of the demand item, e.g. job/<id>
    defer_reason: str  # tag of the reason for which the rest of the gang is not bought

    def sentence(self) -> str:
        why = self.defer_reason.replace("_", " ")
        return f"The node was bought for {subject_name(self.gang)}, whose other nodes cannot be bought now ({why})."


# ---- why a drain is canceled


class DemandReturned(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="demand_returned"):
    """Work arrived that fits on this draining node; keeping the node is cheaper than buying another."""

    demand: tuple[str, ...]

    def sentence(self) -> str:
        work = capitalized(listed([subject_name(key) for key in self.demand]))
        return f"{work} can run on the node, which is cheaper than a new node."


class NoticeWithdrawn(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="notice_withdrawn"):
    """The cloud withdrew its interruption notice; the node stays."""

    notice_id: str

    def sentence(self) -> str:
        return "The cloud withdrew its interruption notice."


DrainReason = (
    NodeIdle
    | NodeUnderused
    | NodeExpired
    | NodeDrifted
    | NodeUnhealthy
    | GangAbandoned
    | SpotReclaim
    | NodeDeleted
    | RebalanceRecommended
    | AboveOverride
    | SpendExhausted
    | BootTimedOut
)
ReleaseReason = BootTimedOut | NodeLost | NodeOrphaned | GangAbandoned | SpendExhausted
KeepReason = DemandReturned | NoticeWithdrawn
