"""Why an action is deferred: offers, the work itself, what keeps a node, and data that is missing or uncertain.

Limits are in `defer_limits.py`, waits for a better purchase in `defer_waits.py`.
"""

from collections.abc import Iterable
from typing import Literal, Self

from gpu_autoscaler.model.format import counted, duration, instant, listed, money, percent, quantity, subject_name
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import IdleRule, Reason, first_listed
from gpu_autoscaler.model.reasons.defer_limits import LimitReason
from gpu_autoscaler.model.reasons.defer_waits import WaitReason
from gpu_autoscaler.model.reasons.upkeep import UpkeepDeferReason

TelemetryFault = Literal["silent", "frozen", "corrupt", "all_zero"]

RESERVATION = "reservation"  # in `KeptAsBuffer.kept_for`

# ---- offers


class NoOfferFits(Reason, frozen=True, kw_only=True, tag="no_offer_fits"):
    """No offer can hold this, however many are bought."""

    detail: str  # what no offer has, in words: "no offer has 16 GPUs of model T4 on one node (most: 4)"

    def sentence(self) -> str:
        return f"No offer satisfies the request: {self.detail}."

    def remedy(self) -> str:
        return (
            "Request less, or allow an instance type, zone or capacity type that satisfies it in a pool of the policy."
        )


class PodConstraintsViolated(Reason, frozen=True, kw_only=True, tag="pod_constraints_violated"):
    """Offers would fit, but every one of them violates a pod affinity, anti-affinity or spread constraint."""

    rules: tuple[str, ...]  # the first of the pod, in words: "even over topology.kubernetes.io/zone within 1"
    rules_unlisted_count: int = 0  # further rules that are not listed

    @classmethod
    def of(cls, rules: Iterable[str]) -> Self:
        """Return the reason with the first rules and the number of the others."""
        listed_rules, unlisted_count = first_listed(rules)
        return cls(rules=listed_rules, rules_unlisted_count=unlisted_count)

    def sentence(self) -> str:
        return f"Every offer violates a pod affinity or spread constraint: {self._rules()}."

    def remedy(self) -> str:
        return f"Relax the constraint ({self._rules()}), or allow zones in a pool where nodes satisfy it."

    def _rules(self) -> str:
        return listed(self.rules, unlisted_count=self.rules_unlisted_count)


class OffersUnavailable(Reason, frozen=True, kw_only=True, tag="offers_unavailable"):
    """Offers fit, but the cloud had no capacity for them lately."""

    offers: tuple[str, ...]  # the first of them
    retry_at: Instant
    offers_unlisted_count: int = 0

    def sentence(self) -> str:
        retry = instant(self.retry_at)
        offers = listed(self.offers, unlisted_count=self.offers_unlisted_count)
        return f"The cloud has no capacity for {offers}; the next attempt is after {retry}."

    def remedy(self) -> str:
        return "Wait, or allow more zones, instance types or capacity types in a pool of the policy."


class PriceUnknown(Reason, frozen=True, kw_only=True, tag="price_unknown"):
    """Offers fit, but none of them has a price; an unknown price is not zero."""

    offers: tuple[str, ...]  # the first of them
    offers_unlisted_count: int = 0

    @classmethod
    def of(cls, offers: Iterable[str]) -> Self:
        """Return the reason with the first offers and the number of the others."""
        listed_offers, unlisted_count = first_listed(offers)
        return cls(offers=listed_offers, offers_unlisted_count=unlisted_count)

    def sentence(self) -> str:
        return f"The price of {self._offers()} is unknown, and offers without a price are not bought."

    def remedy(self) -> str:
        return f"Add the price of {self._offers()} to the provider's price file (see gpu-autoscaler prices --help)."

    def _offers(self) -> str:
        return listed(self.offers, unlisted_count=self.offers_unlisted_count)


# ---- the work itself


class VolumeNotReady(Reason, frozen=True, kw_only=True, tag="volume_not_ready"):
    """A volume of the pod is missing or not bound; no node helps before it is ready."""

    detail: str  # in words: "claim default/data does not exist"

    def sentence(self) -> str:
        return f"A volume of the pod is not ready: {self.detail}."

    def remedy(self) -> str:
        return f"Create or bind the volume ({self.detail}); no node helps before."


class DeviceClaimsUnsupported(Reason, frozen=True, kw_only=True, tag="device_claims_unsupported"):
    """The device claims of the pod are missing or cannot be evaluated; nothing is bought on a guess."""

    detail: str  # in words: "request gpus has alternatives"

    def sentence(self) -> str:
        return f"The device claims of the pod cannot be evaluated: {self.detail}."

    def remedy(self) -> str:
        return (
            "Claim a number of GPUs by attributes that are known before a node exists: product, memory or MIG profile."
        )


class ResourceQuotaExceeded(Reason, frozen=True, kw_only=True, tag="resource_quota_exceeded"):
    """A ResourceQuota of the namespace would refuse pods of the job; no node helps before it allows them."""

    quota: str  # namespace and name
    resource: str  # key of the quota
    used_milli: int  # by pods that exist or are about to be created, in thousandths
    needed_milli: int  # by the pods that are to start together
    hard_milli: int  # limit of the quota, in thousandths

    def sentence(self) -> str:
        return (
            f"ResourceQuota {self.quota} would refuse the pods: they need {quantity(self.needed_milli)} more "
            f"{self.resource}, and {quantity(self.used_milli)} of {quantity(self.hard_milli)} are used."
        )

    def remedy(self) -> str:
        namespace, _, name = self.quota.partition("/")
        return (
            f"Wait until other work in namespace {namespace} ends, or raise {self.resource} of the quota; "
            f"kubectl describe quota {name} --namespace={namespace} shows it."
        )


class CapacityNotFree(Reason, frozen=True, kw_only=True, tag="capacity_not_free"):
    """A request of class check-capacity, or its pods, do not fit on free capacity; nothing is bought for them."""

    members_count: int

    def sentence(self) -> str:
        return (
            f"The free capacity does not hold {counted(self.members_count, 'pod')}, and nothing is bought for a check."
        )

    def remedy(self) -> str:
        return "Wait until capacity is free, or request class best-effort-atomic-scale-up, for which nodes are bought."


class NoDomainFits(Reason, frozen=True, kw_only=True, tag="no_domain_fits"):
    """All members must share a topology domain, and no domain has capacity for all of them."""

    topology_key: str  # label of nodes whose value they share
    domains_count: int  # that were tried, each with what could be bought there
    members_count: int

    def sentence(self) -> str:
        tried, members = counted(self.domains_count, "domain"), counted(self.members_count, "member")
        return f"All {members} must share one {self.topology_key}, and none of {tried} has capacity for all of them."

    def remedy(self) -> str:
        return f"Wait until one {self.topology_key} has capacity for all members, or require a wider topology."


class GroupIncomplete(Reason, frozen=True, kw_only=True, tag="group_incomplete"):
    """The pod group needs more pods to start than exist; nothing is bought for a part of it."""

    group: str  # group/<namespace>/<name>
    members_present: int  # pods that exist
    members_count_min: int  # pods that start together

    def sentence(self) -> str:
        there = f"{self.members_present} of the {counted(self.members_count_min, 'pod')}"
        return f"Only {there} that {subject_name(self.group)} needs exist; a gang starts whole or not at all."

    def remedy(self) -> str:
        missing = counted(self.members_count_min - self.members_present, "pod")
        return f"Create the other {missing} of {subject_name(self.group)}, or lower the group's minimum."


# ---- what keeps a node


class NotYetIdle(Reason, frozen=True, kw_only=True, tag="not_yet_idle"):
    """Empty, but not for long enough."""

    idle_seconds: float
    idle_seconds_max: float
    rule: IdleRule | None = None  # None: of an earlier release

    def sentence(self) -> str:
        limit = duration(self.idle_seconds_max)
        idle = f"The node has been empty for {duration(self.idle_seconds)}; an idle node is removed after {limit}."
        return idle if self.rule is None else f"{idle} {self.rule.sentence()}"

    def remedy(self) -> str:
        left = duration(max(0.0, self.idle_seconds_max - self.idle_seconds))
        return f"No action is needed: the node is removed in {left} unless a pod uses it."


class PodProtected(Reason, frozen=True, kw_only=True, tag="pod_protected"):
    """A pod that must not be disrupted keeps the node."""

    pod_uid: PodUid
    pod: str  # namespace/name
    protection: str  # the annotation, PodDisruptionBudget or rule that protects it

    def sentence(self) -> str:
        return f"Pod {self.pod} must not be disrupted: {self.protection}."

    def remedy(self) -> str:
        return f"Wait until pod {self.pod} ends, or remove its protection ({self.protection})."


class NodeProtected(Reason, frozen=True, kw_only=True, tag="node_protected"):
    """The node itself is annotated as one that must stay."""

    protection: str  # the annotation that protects it

    def sentence(self) -> str:
        return f"The node must not be disrupted: {self.protection}."

    def remedy(self) -> str:
        return f"Remove the protection from the node ({self.protection})."


class PodsFitNowhere(Reason, frozen=True, kw_only=True, tag="pods_fit_nowhere"):
    """Pods of the node fit on no other node."""

    pods: tuple[PodUid, ...]  # the first of them
    pods_unlisted_count: int = 0  # further pods that are not listed

    @classmethod
    def of(cls, pods: Iterable[PodUid]) -> Self:
        """Return the reason with the first pods and the number of the others."""
        listed_pods, unlisted_count = first_listed(pods)
        return cls(pods=listed_pods, pods_unlisted_count=unlisted_count)

    @property
    def pods_count(self) -> int:
        """All of them."""
        return len(self.pods) + self.pods_unlisted_count

    def sentence(self) -> str:
        count = self.pods_count
        return f"{counted(count, 'pod')} of the node {'fits' if count == 1 else 'fit'} on no other node."

    def remedy(self) -> str:
        return f"Wait until other nodes have capacity for {counted(self.pods_count, 'pod')} of the node."


class SavingTooSmall(Reason, frozen=True, kw_only=True, tag="saving_too_small"):
    """Moving the pods would save less than the policy requires."""

    saving_ratio: float  # share of the price that is saved
    saving_ratio_min: float  # required share
    saved_micro_usd: int | None = None  # saved until the work ends; None: the share alone is too small
    move_micro_usd: int | None = None  # price of the move; None: the share alone is too small

    def sentence(self) -> str:
        least = percent(self.saving_ratio_min)
        if self.saved_micro_usd is not None and self.move_micro_usd is not None:
            saved, cost = money(self.saved_micro_usd), money(self.move_micro_usd)
            return f"Moving the pods would save {saved} until they end, or in the payback time, and cost {cost}."
        return f"Moving the pods would save {percent(self.saving_ratio)} of the node's price, less than {least}."

    def remedy(self) -> str:
        if self.move_micro_usd is not None:
            return "To let moves pay for themselves in a longer time, raise removal.replacement_payback_hours."
        return "To consolidate for smaller savings, lower consolidation_saving_ratio_min."


class TooManyUnhealthy(Reason, frozen=True, kw_only=True, tag="too_many_unhealthy"):
    """The share of unhealthy nodes suggests a fault of the monitoring or a common cause: none is removed."""

    unhealthy_count: int  # nodes with a fault
    nodes_count: int
    unhealthy_ratio_max: float  # limit of the policy, 0 to 1

    def sentence(self) -> str:
        unhealthy = f"{self.unhealthy_count} of {counted(self.nodes_count, 'node')}"
        limit = percent(self.unhealthy_ratio_max)
        return f"{unhealthy} look unhealthy, more than {limit}: none is removed until the cause is known."

    def remedy(self) -> str:
        limit = percent(self.unhealthy_ratio_max)
        return f"Inspect the nodes and their monitoring; to remove them, raise removal.unhealthy_ratio_max ({limit})."


class KeptAsBuffer(Reason, frozen=True, kw_only=True, tag="kept_as_buffer"):
    """Empty, but its GPUs are kept free for headroom or the forecast, or its reservation is paid in any case."""

    kept_for: str  # headroom/<name>, forecast/<GPU model, or any>, or reservation/<offer>

    def sentence(self) -> str:
        kind, _, offer = self.kept_for.partition("/")
        if kind == RESERVATION:
            return f"The reservation of the node ({offer}) is paid in any case, so it is kept for the next work."
        return f"The GPUs of the node are kept free for {subject_name(self.kept_for)}."

    def remedy(self) -> str:
        if self.kept_for.startswith(f"{RESERVATION}/"):
            return "To remove empty nodes of reservations too, set removal.is_paid_reservation_kept to false."
        return "To keep fewer GPUs free, lower free_gpu_count of the headroom, or forecast.short_rise_quantile_ratio."


# ---- data that is missing or uncertain


class WatchStale(Reason, frozen=True, kw_only=True, tag="watch_stale"):
    """A failed or old list is not an empty cluster: nothing is decided until it is read again."""

    source: str  # pods, nodes, instances, offers, prices, ledger
    age_seconds: float | None  # None: never read
    age_seconds_max: float

    def sentence(self) -> str:
        limit = duration(self.age_seconds_max)
        if self.age_seconds is None:
            return f"The list of {self.source} has not been read yet; nothing is decided without it."
        return f"The list of {self.source} is {duration(self.age_seconds)} old (limit: {limit})."

    def remedy(self) -> str:
        return (
            f"Check the logs of the service that lists {self.source}; gpu-autoscaler doctor checks access to the cloud."
        )


class TelemetryUnreliable(Reason, frozen=True, kw_only=True, tag="telemetry_unreliable"):
    """GPU utilization is unknown: nothing is decided by it."""

    fault: TelemetryFault  # what is wrong with it
    nodes_count: int  # with this fault
    gpu_nodes_count: int  # all nodes with GPUs

    def sentence(self) -> str:
        nodes = f"{self.nodes_count} of {counted(self.gpu_nodes_count, 'node')} with GPUs"
        return f"GPU utilization is unknown: {nodes} {_FAULTS[self.fault]}. Nothing is decided by utilization."

    def remedy(self) -> str:
        return "Check the DCGM exporter on these nodes."


_FAULTS: dict[TelemetryFault, str] = {
    "silent": "report nothing",
    "frozen": "repeat the same values",
    "corrupt": "report impossible values",
    "all_zero": "report zero although pods hold their GPUs",
}


class UtilizationUnconfirmed(Reason, frozen=True, kw_only=True, tag="utilization_unconfirmed"):
    """GPU utilization is high, but no work waits and no forecast confirms it: utilization alone buys no node."""

    utilization_ratio: float  # mean of all GPUs, 0 to 1
    utilization_ratio_max: float  # threshold of the policy, 0 to 1

    def sentence(self) -> str:
        used, most = percent(self.utilization_ratio), percent(self.utilization_ratio_max)
        return f"GPU utilization is {used}, above {most}, but no work waits and no forecast confirms more demand."

    def remedy(self) -> str:
        return "To buy on utilization alone, set utilization_trigger to direct."


class ForecastUncertain(Reason, frozen=True, kw_only=True, tag="forecast_uncertain"):
    """The forecast expects more demand than there is capacity for, but its confidence is too low to act on."""

    confidence_ratio: float | None  # None: too few of its hours are scored
    confidence_ratio_min: float  # threshold of the policy, 0 to 1

    def sentence(self) -> str:
        least = percent(self.confidence_ratio_min)
        if self.confidence_ratio is None:
            return f"The forecast has too few scored hours to reach the confidence threshold of {least}."
        return f"Forecast confidence {percent(self.confidence_ratio)} is below the threshold of {least}."

    def remedy(self) -> str:
        return "Wait until more hours are scored, or lower forecast.confidence_ratio_min."


# ---- refused plans


class PlanRejected(Reason, frozen=True, kw_only=True, tag="plan_rejected"):
    """The plan check found a violation in what was decided for this; the next attempt waits."""

    violation: str  # the first one that names it
    attempts_count: int  # that ended so, without an hour between two of them
    retry_at: Instant

    def sentence(self) -> str:
        times = "" if self.attempts_count <= 1 else f" ({self.attempts_count} times in a row)"
        return (
            f"The plan check refused what was decided{times}: {self.violation.rstrip('.')}. The next attempt is at "
            f"{instant(self.retry_at)}."
        )

    def remedy(self) -> str:
        return (
            "Report it with the history that gpu-autoscaler replay --save writes: the planner has a bug. The rest of "
            "the cluster is served meanwhile."
        )


DeferReason = (
    NoOfferFits
    | PodConstraintsViolated
    | OffersUnavailable
    | PriceUnknown
    | VolumeNotReady
    | DeviceClaimsUnsupported
    | ResourceQuotaExceeded
    | CapacityNotFree
    | NoDomainFits
    | GroupIncomplete
    | NotYetIdle
    | PodProtected
    | NodeProtected
    | PodsFitNowhere
    | SavingTooSmall
    | TooManyUnhealthy
    | KeptAsBuffer
    | WatchStale
    | TelemetryUnreliable
    | UtilizationUnconfirmed
    | ForecastUncertain
    | PlanRejected
    | UpkeepDeferReason
    | LimitReason
    | WaitReason
)
