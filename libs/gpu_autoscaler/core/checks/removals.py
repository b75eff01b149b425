"""The part of the second opinion that looks at what a plan removes. Called by `core/check.py` alone.

Shares no code with the steps of `plan`: protections, budgets and room are read again here, in their simplest form.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from gpu_autoscaler.core.checks.budgets import beyond_budgets
from gpu_autoscaler.core.checks.force import unfounded_force, vain_replacements
from gpu_autoscaler.core.checks.health import unproven_sickness
from gpu_autoscaler.core.checks.money import unfounded_poverty
from gpu_autoscaler.core.checks.patience import hurried_moves
from gpu_autoscaler.core.nodes.life import NodePhase, NodeView, node_views
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.directives import Override
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons import (
    AboveOverride,
    BootTimedOut,
    GangAbandoned,
    SpendExhausted,
    NodeDeleted,
    NodeIdle,
    SpotReclaim,
)
from gpu_autoscaler.model.resources import Resources


def removal_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each removal that must not happen, and for each doomed node that is left alone."""
    views = node_views(state, plan.as_of)
    drains = [decision for decision in plan.decisions if isinstance(decision, DrainNode)]
    chosen = [drain for drain in drains if not isinstance(drain.reason, SpotReclaim | NodeDeleted | SpendExhausted)]
    releases = [decision for decision in plan.decisions if isinstance(decision, ReleaseInstance)]
    # Gone through only where something asks: of ten thousand pods most plans touch none.
    is_asked = bool(drains) or any(view.notice is not None for view in views)
    pods = _pods_by_node(state) if is_asked else {}
    unpaid = [drain for drain in drains if isinstance(drain.reason, SpendExhausted)]
    ours_count = len(chosen) + len(unpaid) + len(releases)
    if policy.is_frozen and ours_count:
        yield f"{ours_count} nodes are removed by choice while the policy is frozen"
    if ours_count:
        yield from _old_pictures(plan, state, policy)
    yield from unfounded_poverty(plan, state, policy)
    for drain in drains:
        yield from _wrong_node(drain, state, plan.as_of)
    for drain in chosen:
        if drain.is_voluntary:
            yield from _protected_node(drain, state, pods.get(drain.node_name, ()))
            yield from hurried_moves(drain, pods.get(drain.node_name, ()), state, policy, plan.as_of)
        else:
            yield from unfounded_force(drain, state, policy, plan.as_of)
        yield from _homeless_pods(drain, drains, views, pods)
    yield from _broken_budgets([drain for drain in chosen if drain.is_voluntary], state, pods)
    yield from _too_many(chosen, plan, state, policy, views)
    yield from unproven_sickness(chosen, state, policy, plan.as_of)
    yield from _wrong_releases(releases, views, plan.as_of)
    yield from _ended_with_work(releases, views, state)
    yield from _gangs_in_hand(plan)
    yield from _wrong_cancels(plan, state)
    yield from vain_replacements(plan, state, policy)
    yield from _doomed_left_alone(plan, drains, views, pods)


def _pods_by_node(state: ClusterState) -> dict[str, list[PodObserved]]:
    """Work on each node: what belongs to the node itself, or has ended, is left out."""
    pods: dict[str, list[PodObserved]] = {}
    for pod in state.pods.values():
        has_ended = pod.phase in ("succeeded", "failed")
        if pod.node_name is not None and not has_ended and pod.owner_kind not in ("DaemonSet", "Node"):
            pods.setdefault(pod.node_name, []).append(pod)
    return pods


def _old_pictures(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    for name, synced in (("pods", state.pods_synced), ("nodes", state.nodes_synced)):
        if synced is None or (plan.as_of - synced.seen_at).total_seconds() > policy.watch_age_seconds_max:
            yield f"nodes are removed by choice on an old or missing list of {name}"


def _wrong_node(drain: DrainNode, state: ClusterState, as_of: datetime) -> Iterator[str]:
    """A drain names a node that exists and is ours; one against our will has a notice behind it."""
    node = state.nodes.get(drain.node_uid)
    if node is None or node.name != drain.node_name:
        yield f"node {drain.node_name} is drained, but there is no such node"
        return
    if drain.provider_id is not None and drain.provider_id != node.provider_id:
        yield f"node {drain.node_name} is drained with an instance that is not its own: {drain.provider_id}"
    if isinstance(drain.reason, NodeDeleted):
        if node.deleting_since is None or not node.is_guarded or not _is_ours(node, state):
            yield f"node {drain.node_name} is drained as deleted by hand, but it is not, or is not held by us"
        return
    is_chosen = not isinstance(drain.reason, SpotReclaim)
    if is_chosen and not _is_ours(node, state):
        yield f"node {drain.node_name} is drained by choice, but we did not buy it"
    standing = (record for record in state.notices.values() if record.withdrawn is None)
    if not is_chosen and all(record.notice.provider_id != node.provider_id for record in standing):
        yield f"node {drain.node_name} is drained against its will, but no notice stands"
    if is_chosen and drain.deadline_at <= as_of:
        yield f"node {drain.node_name} is drained by choice with a deadline that has passed"


def _is_ours(node: NodeObserved, state: ClusterState) -> bool:
    launched = {order.launched.provider_id for order in state.orders.values() if order.launched is not None}
    return node.action_id is not None or node.provider_id in launched


def _protected_node(drain: DrainNode, state: ClusterState, pods: Iterable[PodObserved]) -> Iterator[str]:
    node = state.nodes.get(drain.node_uid)
    marks = () if node is None else node.annotations
    keys = (labels.SCALE_DOWN_DISABLED, labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT)
    if any(key in keys and value == "true" for key, value in marks):
        yield f"node {drain.node_name} is drained by choice, but is marked to stay"
    for pod in pods:
        if isinstance(drain.reason, NodeIdle | GangAbandoned | AboveOverride):
            yield f"node {drain.node_name} is drained as idle, but pod {pod.namespace}/{pod.name} is there"
        job = None if pod.job_id is None else state.jobs.get(pod.job_id)
        is_kept = job is not None and job.queued is not None and not job.queued.spec.is_preemptible
        is_going = pod.deleting_since is not None  # told to go already, by whomever
        if not is_going and (is_kept or _is_protected(pod)):
            yield f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name} is protected"


def _is_protected(pod: PodObserved) -> bool:
    marks = dict(pod.annotations)
    if "true" in (marks.get(labels.DO_NOT_DISRUPT), marks.get(labels.KARPENTER_DO_NOT_DISRUPT)):
        return True
    safe = marks.get(labels.SAFE_TO_EVICT)
    starts_over = pod.owner_kind == "Job" and labels.CHECKPOINTED_AT not in marks  # it is asked to save first
    loses_work = pod.owner_kind is None or starts_over or pod.has_local_storage
    return safe == "false" or (safe != "true" and loses_work)


def _broken_budgets(
    chosen: list[DrainNode], state: ClusterState, pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    there = [pod for drain in chosen for pod in pods.get(drain.node_name, ())]
    moved = [pod for pod in there if pod.deleting_since is None]  # the others are told to go already
    for budget in state.budgets.values():
        count = sum(1 for pod in moved if _selects(budget, pod))
        if count > budget.disruptions_allowed:
            name = f"{budget.namespace}/{budget.name}"
            yield f"{count} pods of disruption budget {name} would move, it allows {budget.disruptions_allowed}"


def _selects(budget: PodBudgetObserved, pod: PodObserved) -> bool:
    marks = dict(pod.labels)
    for need in budget.match_labels:
        value = marks.get(need.key)
        holds = {
            "In": value in need.values,
            "NotIn": value not in need.values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds.get(need.operator, True):
            return False
    return budget.namespace == pod.namespace


def _homeless_pods(
    drain: DrainNode, drains: list[DrainNode], views: tuple[NodeView, ...], pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    """Each pod alone, and all together in each amount, fit on the usable nodes that stay."""
    going = {each.node_name for each in drains}
    free = []
    for view in views:
        if view.phase is NodePhase.READY and view.notice is None and view.name not in going:
            taken = [pod.requests for pod in pods.get(view.name, ())]
            free.append((view.gpu_model, sum(taken, start=Resources()), view.allocatable))
    moved = [pod for pod in pods.get(drain.node_name, ()) if pod.deleting_since is None]
    for pod in moved:
        model = pod.gpu_model
        if not any((taken + pod.requests).fits_in(all_) and model in (None, has) for has, taken, all_ in free):
            yield f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name} fits nowhere else"
    whole = sum((room - taken for _, taken, room in free), start=Resources())
    asked = sum((pod.requests for pod in moved), start=Resources())
    if not asked.fits_in(whole):
        yield f"node {drain.node_name} is drained by choice, but its pods do not all fit elsewhere"


def _too_many(
    chosen: list[DrainNode], plan: Plan, state: ClusterState, policy: ScalingPolicy, views: tuple[NodeView, ...]
) -> Iterator[str]:
    """Few at once, and never below the minimum; what never became a node that could be used is none of either."""
    chosen = [drain for drain in chosen if not isinstance(drain.reason, BootTimedOut)]
    if not chosen:
        return
    kept = {each.node_uid for each in plan.decisions if isinstance(each, CancelDrain)}
    going: set[NodeUid] = {drain.node_uid for drain in chosen}
    if len(going) < len(chosen):
        yield "a node is drained twice by one plan"
    moving = set(going)
    for record in state.drains.values():
        said = record.decision
        is_over = record.drained is not None or record.cancelled is not None or record.terminated is not None
        if (
            isinstance(said, DrainNode)
            and not isinstance(said.reason, SpotReclaim | NodeDeleted | BootTimedOut)
            and not is_over
            and said.node_uid in state.nodes
        ):
            moving.add(said.node_uid)
    ours = [view for view in views if view.is_ours and view.is_counted]
    usable_count = sum(1 for view in ours if view.usable_since is not None)
    # Rounded up, so less than one node more than the share; binary fractions are off by far less than a millionth.
    if len(moving - kept) - usable_count * policy.disruption_ratio_max > 1 - 1e-6:
        yield f"{len(moving - kept)} nodes of {usable_count} would be leaving by choice at once"
    yield from beyond_budgets(chosen, len(moving - kept - going), usable_count, policy, plan.as_of)
    staying_count = sum(1 for view in ours if view.node_uid not in going and not view.is_leaving)
    least = min((policy.nodes_count_min, *_most_wanted(plan, state)))
    if staying_count < least:
        yield f"{staying_count} nodes would be left of at least {least}"


def _most_wanted(plan: Plan, state: ClusterState) -> Iterator[int]:
    """What somebody allows in all for a while goes before the policy's least."""
    for record in state.directives.values():
        said = record.given.directive
        if record.lifted is None and plan.as_of < record.given.until and isinstance(said, Override):
            is_of_all = said.pool is None and said.gpu_model is None
            if is_of_all and said.nodes_count_max is not None:
                yield said.nodes_count_max


def _wrong_releases(releases: list[ReleaseInstance], views: tuple[NodeView, ...], as_of: datetime) -> Iterator[str]:
    by_action = {view.action_id: view for view in views}
    for release in releases:
        view = by_action.get(release.order_action_id)
        if view is None or not view.is_ours:
            yield f"order {release.order_action_id} is given back, but it is not one of ours that is open"
        elif view.phase is NodePhase.READY:
            yield f"order {release.order_action_id} is given back, but its node {view.name} is in use"
        elif isinstance(release.reason, GangAbandoned | SpendExhausted):
            continue
        elif view.usable_by is not None and as_of < view.usable_by and view.phase is not NodePhase.FAILED:
            yield f"order {release.order_action_id} is given back before its deadline"


def _ended_with_work(
    releases: list[ReleaseInstance], views: tuple[NodeView, ...], state: ClusterState
) -> Iterator[str]:
    """A node that is up is emptied before it ends."""
    up = {view.action_id: view.name for view in views if view.node is not None and view.node.is_ready}
    for release in releases:
        name = up.get(release.order_action_id)
        if isinstance(release.reason, BootTimedOut) and name is not None:
            for pod in state.pods.values():
                if pod.node_name == name and pod.phase == "running" and pod.owner_kind not in ("DaemonSet", "Node"):
                    yield f"node {name} is given back while {pod.namespace}/{pod.name} runs on it"


def _gangs_in_hand(plan: Plan) -> Iterator[str]:
    """A gang is given up as a whole: nothing is bought for it in the same breath, and the plan says why."""
    held = {each.subject: each.reason.tag() for each in plan.deferred}
    bought = {each.gang for each in plan.decisions if isinstance(each, BuyNode)}
    for decision in plan.decisions:
        if isinstance(decision, DrainNode | ReleaseInstance) and isinstance(decision.reason, GangAbandoned):
            gang = decision.reason.gang
            if gang in bought or held.get(gang) != decision.reason.defer_reason:
                yield f"a node of gang {gang} goes as given up, but the gang is not held back for it"


def _wrong_cancels(plan: Plan, state: ClusterState) -> Iterator[str]:
    for decision in plan.decisions:
        if isinstance(decision, CancelDrain):
            record = state.drains.get(decision.drain_action_id)
            if record is None or record.drained is not None or record.terminated is not None:
                yield f"a drain of node {decision.node_name} is cancelled that is not under way"


def _doomed_left_alone(
    plan: Plan, drains: list[DrainNode], views: tuple[NodeView, ...], pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    """A node under notice drains, and its pods are bought for, or held back with a reason."""
    draining = {drain.node_uid for drain in drains if not drain.is_voluntary}
    spoken_for = {held.subject for held in plan.deferred}
    for decision in plan.decisions:
        spoken_for.update(getattr(decision.reason, "demand", ()))
    for view in views:
        if view.notice is None or view.node_uid is None:
            continue
        decided = None if view.drain is None else view.drain.decision
        is_forced = isinstance(decided, DrainNode) and not decided.is_voluntary
        is_going = is_forced or view.node_uid in draining or view.phase in (NodePhase.DRAINED, NodePhase.TERMINATING)
        if not is_going:
            yield f"node {view.name} is under notice since {view.notice.first_received_at}, and nothing drains it"
        for pod in pods.get(view.name, ()):
            is_settled = pod.owner_kind is None or pod.deleting_since is not None
            if not is_settled and f"pod/{pod.pod_uid}" not in spoken_for:
                yield f"pod {pod.namespace}/{pod.name} loses its node: neither is one bought, nor said why not"
