"""Why a node is bought."""

import enum

import msgspec

from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.format import capitalized, counted, instant, listed, money, percent, price, subject_name
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.money import HOURS_PER_MONTH
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import Reason, ReasonWithoutRemedy


class RejectionCause(enum.StrEnum):
    """Why the cheapest offer was not selected."""

    UNAVAILABLE = "unavailable"
    SPOT_NOT_ALLOWED = "spot_not_allowed"
    LIMIT = "limit"
    RESERVED_FIRST = "reserved_first"
    POOL_PRIORITY = "pool_priority"
    INTERRUPTION_RATE = "interruption_rate"
    CAPACITY_POOL_SHARE = "capacity_pool_share"
    EXPECTED_COST = "expected_cost"
    FLEET_COST = "fleet_cost"

    def clause(self) -> str:
        return _REJECTION_CLAUSES[self]


_REJECTION_CLAUSES = {
    RejectionCause.UNAVAILABLE: "the cloud had no capacity for it lately",
    RejectionCause.SPOT_NOT_ALLOWED: "this work must not run on spot",
    RejectionCause.LIMIT: "it would exceed a limit",
    RejectionCause.RESERVED_FIRST: "reserved capacity is already paid for",
    RejectionCause.POOL_PRIORITY: "its pool has a lower priority",
    RejectionCause.INTERRUPTION_RATE: "its interruption rate is too high",
    RejectionCause.CAPACITY_POOL_SHARE: "too many GPUs would depend on one spot capacity pool",
    RejectionCause.EXPECTED_COST: "its boot time and expected interruptions make it more expensive",
    RejectionCause.FLEET_COST: "the selected offers are cheaper for the whole purchase",
}


class RejectedOffer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The cheapest offer that fits the same work, and why it was not selected."""

    offer: str  # name of the offer
    price_micro_usd_per_hour: int
    because: RejectionCause  # why it was not selected

    def sentence(self) -> str:
        at = price(self.price_micro_usd_per_hour)
        return f"The cheaper offer {self.offer} at {at} was not selected: {self.because.clause()}."

    def spread_micro_usd_per_hour(self, price_micro_usd_per_hour: int) -> int:
        """Return what the selected offer costs more, if the share of a capacity pool is the reason for it; else 0."""
        if self.because is not RejectionCause.CAPACITY_POOL_SHARE:
            return 0
        return max(0, price_micro_usd_per_hour - self.price_micro_usd_per_hour)


class DroppedPreference(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A preference of the work that the purchase does not satisfy, and the offer that would."""

    preference: str  # in words
    kept_by: str | None = None  # the cheapest offer that satisfies it by itself; None: no available offer does
    price_micro_usd_per_hour: int = 0  # of that offer

    def sentence(self) -> str:
        if self.kept_by is None:
            return f"Preference not satisfied: {self.preference} (no available offer satisfies it)."
        offer = f"{self.kept_by} at {price(self.price_micro_usd_per_hour)}"
        return f"Preference not satisfied: {self.preference} ({offer} would satisfy it)."


class UnmetDemand(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="unmet_demand"):
    """Work waits, and no running, booting or ordered node has capacity for it."""

    demand: tuple[str, ...]  # keys of the demand items that this node is for, e.g. job/<id>, pod/<uid>
    offers_considered: int  # number of offers that were compared
    price_micro_usd_per_hour: int
    instead_of: RejectedOffer | None = None  # None: no offer that fits is cheaper
    dropped: tuple[DroppedPreference, ...] = ()  # preferences of the work that are not satisfied
    nodes_avoided_count: int = 0  # with free capacity, each of which costs more to keep for some of the work

    def sentence(self) -> str:
        work = listed([subject_name(key) for key in self.demand]) or "the waiting work"
        selected = f"selected from {counted(self.offers_considered, 'offer')} at {price(self.price_micro_usd_per_hour)}"
        why = f"No running, booting or ordered node has capacity for {work}; {selected}."
        if self.nodes_avoided_count:
            avoided = counted(self.nodes_avoided_count, "node")
            why = f"Keeping {avoided} with free capacity for {work} would cost more than a new one; {selected}."
        return why + _alternatives(self.instead_of, self.dropped) + self._spread_cost()

    def _spread_cost(self) -> str:
        per_hour = (
            0 if self.instead_of is None else self.instead_of.spread_micro_usd_per_hour(self.price_micro_usd_per_hour)
        )
        return f" Not depending on it costs {money(per_hour * HOURS_PER_MONTH)} a month." if per_hour else ""


class ReplacesAtRiskNode(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="replaces_at_risk_node"):
    """A node with work on it is about to be removed; this node takes over its work."""

    node_uid: NodeUid
    node_name: str
    reclaim_at: Instant | None
    demand: tuple[str, ...] = ()
    instead_of: RejectedOffer | None = None  # as for unmet demand; None: no offer that fits is cheaper
    dropped: tuple[DroppedPreference, ...] = ()  # as for unmet demand

    def sentence(self) -> str:
        when = "soon" if self.reclaim_at is None else f"at {instant(self.reclaim_at)}"
        why = f"Node {self.node_name} will be removed {when}, and its pods need capacity elsewhere."
        return why + _alternatives(self.instead_of, self.dropped)


class BelowMinimum(Reason, frozen=True, kw_only=True, tag="below_minimum"):
    """There are fewer nodes than the policy's minimum."""

    nodes_count: int  # nodes there, or on their way, that stay
    nodes_count_min: int

    def sentence(self) -> str:
        least = counted(self.nodes_count_min, "node")
        return f"The policy requires at least {least} (now: {self.nodes_count})."

    def remedy(self) -> str:
        return "To run fewer nodes, lower nodes_count_min or the active entry of scheduled_limits."


class ReplacesNodes(ReasonWithoutRemedy, frozen=True, kw_only=True, tag="replaces_nodes"):
    """Nodes are to be removed voluntarily and their pods fit nowhere else; this node is ready before they drain."""

    cause: str  # as disruption budgets name it: underused, drifted, expired, unhealthy
    node_uids: tuple[NodeUid, ...]
    node_names: tuple[str, ...]
    demand: tuple[str, ...]  # keys of the pods that are to move, pod/<uid>

    def sentence(self) -> str:
        nodes = f"{counted(len(self.node_names), 'node')} ({listed(self.node_names)}; {self.cause})"
        return f"Replaces {nodes}: {counted(len(self.demand), 'pod')} there would fit nowhere else."


class CapacityBuffer(Reason, frozen=True, kw_only=True, tag="capacity_buffer"):
    """No work waits yet, but headroom or the forecast requires free GPUs."""

    demand: tuple[str, ...]  # headroom/<name>, or forecast/<GPU model, or any>
    free_gpu_count: int  # free or on their way, after waiting work is served
    wanted_gpu_count: int  # GPUs to keep free

    def sentence(self) -> str:
        wanted = counted(self.wanted_gpu_count, "GPU")
        purpose = listed([subject_name(key) for key in self.demand])
        return f"{capitalized(purpose)}: {wanted} must be free ({self.free_gpu_count} free or ordered)."

    def remedy(self) -> str:
        return "To keep fewer GPUs free, lower free_gpu_count of the headroom, or forecast.long_rise_quantile_ratio."


class BelowOverride(Reason, frozen=True, kw_only=True, tag="below_override"):
    """There are fewer nodes or GPUs than a temporary override requires."""

    demand: tuple[str, ...]  # override/<scope>
    attribution: Attribution
    unit: str  # node or GPU
    count: int  # there or on their way, and staying
    count_min: int

    def sentence(self) -> str:
        override = self.attribution.override("requires at least", self.count_min, self.unit, self.count)
        return f"{capitalized(override)}."

    def remedy(self) -> str:
        return self.attribution.remedy()


class UtilizationHigh(Reason, frozen=True, kw_only=True, tag="utilization_high"):
    """GPU utilization is above the policy's threshold, and utilization_trigger is direct."""

    utilization_ratio: float  # mean of all GPUs, 0 to 1
    utilization_ratio_max: float  # threshold of the policy, 0 to 1

    def sentence(self) -> str:
        used, most = percent(self.utilization_ratio), percent(self.utilization_ratio_max)
        return f"GPU utilization is {used}, above {most}, and the policy buys a node for that alone."

    def remedy(self) -> str:
        return "To buy for waiting work only, set utilization_trigger to gated."


def _alternatives(instead_of: RejectedOffer | None, dropped: tuple[DroppedPreference, ...]) -> str:
    parts = (*(() if instead_of is None else (instead_of,)), *dropped)
    return "".join(f" {part.sentence()}" for part in parts)


BuyReason = (
    UnmetDemand | ReplacesAtRiskNode | ReplacesNodes | BelowMinimum | CapacityBuffer | BelowOverride | UtilizationHigh
)
