"""What a move by choice saves until the moved work ends, and what the move itself costs.

A node stays until its last work ends. The node that work leaves is saved for as long as that work was expected to run;
one that takes it stays longer, by the share that `core/provisioning/keep_or_buy.py` counts. What nothing is known of,
and what runs longer, counts for the payback time of the policy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from gpu_autoscaler.core.demand.durations import Durations
from gpu_autoscaler.core.disruption.eligibility import gpu_seconds_at_risk
from gpu_autoscaler.core.disruption.repack import Relocation, moving_pods
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.next_change import start_of_span
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause

HOUR_SECONDS = 3600.0
SPAN_SECONDS = 300  # what remains of work, and what it has not saved, is looked at this often


class Price(NamedTuple):
    """Micro-dollars of a move."""

    stays: float  # of the nodes that the work leaves, until it ends
    saved: float  # of these, what is left after the nodes that the work goes to
    move: float  # for two nodes at a time, and repeated work

    @property
    def saving_ratio(self) -> float:
        return max(0.0, self.saved) / self.stays if self.stays else 0.0

    @property
    def is_paid_back(self) -> bool:
        return self.saved > self.move

    @property
    def worth(self) -> float:
        """Saving for each micro-dollar of the move."""
        return self.saved / max(1.0, self.move)


class MovePricing:
    """Prices moves in one plan."""

    def __init__(self, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> None:
        self._draft, self._state, self._policy = draft, state, policy
        self._durations = Durations(state)

    def price(self, group: Sequence[NodeView], relocation: Relocation, purchases: Sequence[Purchase]) -> Price | None:
        """Return the price of moving the work of these nodes to free ones and to new ones; None: one of those has no
        known price."""
        by_node = [(view, moving_pods(view, self._draft)) for view in group]
        pods = [pod for _, there in by_node for pod in there]
        stays = sum(self._hourly(view) * self._longest(there) for view, there in by_node)
        added = self._longer(relocation.placed)
        if added is None:
            return None
        overhead = self._policy.node_overhead_micro_usd_per_hour
        # One node drains after the other, and the new ones wait for all of that.
        longest, drain_seconds = self._longest(pods), self._policy.drain_seconds_max * len(group)
        move = 0.0 if purchases else sum(map(self._hourly, group)) * drain_seconds
        for purchase in purchases:
            offer = purchase.decision.offer
            if offer.price_micro_usd_per_hour is None:
                return None
            is_kept_as_paid = self._policy.removal.is_paid_reservation_kept
            is_paid = is_kept_as_paid and offer.capacity_type is CapacityType.RESERVED
            hourly = overhead + (0 if is_paid else offer.price_micro_usd_per_hour)
            added += hourly * longest
            move += hourly * (offer.boot_seconds + drain_seconds)
        move += sum(self._repeated(view, there) for view, there in by_node)
        return Price(stays / HOUR_SECONDS, (stays - added) / HOUR_SECONDS, move / HOUR_SECONDS)

    @cached_property
    def _at(self) -> datetime:
        return start_of_span(self._draft.as_of, SPAN_SECONDS)

    @cached_property
    def _views(self) -> Mapping[str, NodeView]:
        return {bin_key(view): view for view in self._draft.views}

    # ---- micro-dollars an hour, times seconds

    def _hourly(self, view: NodeView) -> float:
        price = added_micro_usd_per_hour(view, self._state, self._policy, self._draft.as_of) or 0
        return price + self._policy.node_overhead_micro_usd_per_hour

    def _longer(self, placed: Iterable[tuple[PodObserved, str]]) -> float | None:
        """Return what the nodes that take pods cost longer; nodes of others are not billed to us. None: unknown."""
        total, jobs_count = 0.0, Counter[str]()
        for pod, key in placed:
            view = self._views[key]
            if not view.is_ours:
                continue
            if view.price_micro_usd_per_hour is None:
                return None
            if key not in jobs_count:
                there = self._draft.pods.get(view.name, ())
                jobs_count[key] = len({other.job_id or other.pod_uid for other in there if counts_for_idleness(other)})
            jobs_count[key] += 1
            total += self._hourly(view) * self._seconds(pod) / jobs_count[key]
        return total

    def _repeated(self, view: NodeView, pods: Iterable[PodObserved]) -> float:
        at_risk = gpu_seconds_at_risk(pods, self._policy.removal.checkpoint_interval_seconds, self._at)
        return (view.price_micro_usd_per_hour or 0) / max(1, view.allocatable.gpu_count) * at_risk

    # ---- for how long

    def _longest(self, pods: Iterable[PodObserved]) -> float:
        return max(map(self._seconds, pods), default=0.0)

    def _seconds(self, pod: PodObserved) -> float:
        job = None if pod.job_id is None else self._state.jobs.get(pod.job_id)
        expected = None if job is None else self._durations.of_job(job, self._at)
        longest = self._policy.removal.replacement_payback_hours * HOUR_SECONDS
        return longest if expected is None else min(longest, expected.mean_seconds)


def paid_reservation(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Offer | None:
    """Return the reservation that is paid with or without the node, and for which the policy keeps it; None: the node
    costs its price."""
    bought = None if view.order is None or view.order.decision is None else view.order.decision.offer
    if bought is None or bought.capacity_type is not CapacityType.RESERVED:
        return None
    offers = (bought,) if state.offers is None else state.offers.offers  # unknown: as when it was bought
    offer = next((offer for offer in offers if offer.key == bought.key), None)
    if not policy.removal.is_paid_reservation_kept or offer is None:
        return None
    is_over = offer.paid_until is not None and as_of >= offer.paid_until
    return None if is_over or offer.unavailable_by is UnavailabilityCause.NO_RESERVATION else bought


def added_micro_usd_per_hour(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> int | None:
    """Return what the node adds to the bill; None: unknown."""
    return 0 if paid_reservation(view, state, policy, as_of) is not None else view.price_micro_usd_per_hour
