"""Step `keep_solvent`: before what runs passes a hard limit of money, nodes make way, cheapest to lose first.

Work keeps what is promised to it in the order of what its loss would cost, as far as the money reaches. The rest runs
on what is left, and goes while each node can still be emptied in peace, with those dearer to lose after it. Protected
work is never told to go: where it passes the limit, that is said.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from gpu_autoscaler.core.bins import bin_key
from gpu_autoscaler.core.demand import job_spec, pod_priority
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.freshness import stale_watch
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.checkpoints import checkpointed_at
from gpu_autoscaler.core.removing.moving import moving_pods
from gpu_autoscaler.core.removing.protection import marked_pod, node_protection
from gpu_autoscaler.core.spending.claims import ENDING_SECONDS, Claim
from gpu_autoscaler.core.spending.money import SpendSnapshot, SpendCap, spend_snapshot_of, spend_caps
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Deferred, ReleaseInstance
from gpu_autoscaler.model.reasons import SpendEnforcementBlocked, SpendExhausted

_STEP = "keep_solvent"
# From one plan to the next, with time to be late: nothing can be decided in between.
_BLIND_SECONDS = 60.0
_SECONDS_PER_HOUR = 3600
_OVER = (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED)


class _Stake(NamedTuple):
    """A node that runs on, and what it would cost to lose it."""

    view: NodeView
    claim: Claim
    protection: str | None  # it stays, whatever it costs
    worth: tuple[int, int, int, str]  # priority, work that would be lost, cheapness, name: the smallest goes first
    leaving_seconds: float  # from the decision to the end of its bill

    def micro_usd(self, seconds: float) -> int:
        """What it costs in this time, rounded up."""
        return round((self.claim.price_micro_usd_per_hour or 0) * seconds / _SECONDS_PER_HOUR) + 1

    @property
    def way_out_micro_usd(self) -> int:
        """What it still costs when it goes now."""
        return self.micro_usd(self.leaving_seconds)


def keep_solvent(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Nodes make way for which no money is left under a hard limit, in time; protected ones are told of."""
    hard = [cap for cap in spend_caps(policy) if cap.is_hard]
    if not hard:
        return draft
    books = spend_snapshot_of(state, draft.views, draft.pods, policy, draft.as_of)
    for cap in hard:
        draft = _within(cap, books, draft, state, policy)
    return draft


def _within(cap: SpendCap, books: SpendSnapshot, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    left = cap.micro_usd_max - books.spent[cap]
    claims = {claim.name: claim for claim in books.claims(cap)}
    leaving = draft.leaving()
    stakes: list[_Stake] = []
    for view in draft.views:
        claim = claims.get(view.name)
        if claim is None:
            continue
        if view.name in leaving or view.phase in _OVER or view.notice is not None:
            left -= books.rest(claim, cap)
        else:
            stakes.append(_stake(view, claim, draft, state, policy))
    stakes.sort(key=lambda stake: (stake.protection is not None, stake.worth))
    left, running = _promised(stakes, left, books, cap)
    due = _due(running, left)
    if not due:
        return draft
    if (stale := stale_watch(state, policy, draft.as_of)) is not None:
        return draft.adding(deferred=[Deferred(step=_STEP, subject="cluster", reason=stale)])
    for stake in due:
        draft = _make_way(stake, cap, books, left, draft, policy)
    return draft


def _promised(stakes: Sequence[_Stake], left: int, books: SpendSnapshot, cap: SpendCap) -> tuple[int, list[_Stake]]:
    """Set aside what is promised to the nodes that are dearest to lose, as far as money reaches; return what is left,
    and the nodes that run on it, cheapest to lose first."""
    running = list(stakes)
    for stake in reversed(stakes):
        promised = books.rest(stake.claim, cap)
        if promised > left:
            break  # nobody who is cheaper to lose keeps more than this one
        left -= promised
        running.remove(stake)
    return left, running


def _due(running: Sequence[_Stake], left: int) -> list[_Stake]:
    """Those that have to go now, so that the ones after them can still go later."""
    due: list[_Stake] = []
    own = sum(stake.way_out_micro_usd for stake in running)
    blind = sum(stake.micro_usd(_BLIND_SECONDS) for stake in running)
    for stake in running:
        later = own - stake.way_out_micro_usd
        if left >= own + later + blind:
            break
        due.append(stake)
        left -= stake.way_out_micro_usd
        own, blind = later, blind - stake.micro_usd(_BLIND_SECONDS)
    return due


def _make_way(stake: _Stake, cap: SpendCap, books: SpendSnapshot, left: int, draft: Draft, policy: ScalingPolicy) -> Draft:
    view = stake.view
    if stake.protection is not None:
        crossed = SpendEnforcementBlocked(
            owner=cap.owner,
            period=cap.period,
            left_micro_usd=max(0, left),
            limit_micro_usd=cap.micro_usd_max,
            until=books.end(cap),
            protection=stake.protection,
        )
        return draft.adding(deferred=[Deferred(step=_STEP, subject=f"node/{view.node_uid}", reason=crossed)])
    reason = SpendExhausted(
        owner=cap.owner,
        period=cap.period,
        spent_micro_usd=books.spent[cap],
        limit_micro_usd=cap.micro_usd_max,
        until=books.end(cap),
    )
    if bin_key(view) in draft.room:
        draft.room.remove(bin_key(view))
    if view.node_uid is not None:
        deadline_at = draft.as_of + timedelta(seconds=policy.drain_seconds_max)
        return draft.adding(removals=[draft.drain(view, reason, deadline_at=deadline_at, is_voluntary=False)])
    if view.provider_id is None or view.action_id is None:
        return draft  # being asked for at this moment: given back once there is something to give back
    release = ReleaseInstance(
        action_id=draft.next_action_id(), provider_id=view.provider_id, order_action_id=view.action_id, reason=reason
    )
    return draft.adding(removals=[release])


def _stake(view: NodeView, claim: Claim, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> _Stake:
    pods = moving_pods(view, draft)
    lost_seconds = max((_lost_seconds(pod, draft) for pod in pods), default=0.0)
    price = claim.price_micro_usd_per_hour or 0
    priority = max((pod_priority(pod, job_spec(state, pod.job_id)) for pod in pods), default=-1)
    return _Stake(
        view=view,
        claim=claim,
        protection=_protection(view, pods, draft, state),
        worth=(priority, round(price * lost_seconds / _SECONDS_PER_HOUR), -price, view.name),
        leaving_seconds=ENDING_SECONDS + (policy.drain_seconds_max if pods else 0.0),
    )


def _lost_seconds(pod: PodObserved, draft: Draft) -> float:
    """Work that would be done again: since the last save, else since the start."""
    since = checkpointed_at(dict(pod.annotations)) or pod.started_at
    return 0.0 if since is None else max(0.0, (draft.as_of - since).total_seconds())


def _protection(view: NodeView, pods: Sequence[PodObserved], draft: Draft, state: ClusterState) -> str | None:
    """What keeps the node whatever it costs: a mark that somebody made, a budget of disruptions, a promise to a job."""
    if view.node is not None and (mark := node_protection(view.node, draft.as_of)) is not None:
        return mark
    for pod in pods:
        spec = job_spec(state, pod.job_id)
        mark = marked_pod(pod, state.budgets.values(), draft.as_of)
        if mark is None and spec is not None and not spec.is_preemptible:
            mark = "its job is not preemptible"
        if mark is not None:
            return f"pod {pod.namespace}/{pod.name}: {mark}"
    return None
