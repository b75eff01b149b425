"""Pods that start together because they say so: the PodGroups of others (Coscheduling, Kueue, Volcano) as gangs.

Of a group with a minimum so many pods are a gang, those that run counted: all of these get room or none does. What it
has besides are pods like any other, served after their gang. A group without a minimum is a gang of all that wait.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from gpu_autoscaler.core.demand_items import DemandItem, DemandSource
from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.reasons import DeferReason
from gpu_autoscaler.model.shape_reasons import GroupIncomplete

_KEYS = (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION)
_MINIMA = (*labels.POD_GROUP_MIN_AVAILABLE, labels.POD_GROUP_TOTAL_COUNT)


def group_into_gangs(
    items: list[DemandItem], unbound: tuple[PodObserved, ...], pods: Mapping[PodUid, PodObserved]
) -> list[DemandItem]:
    """Pending pods of one group become a gang, which waits like its first and best member."""
    groups = {pod.pod_uid: group for pod in unbound if (group := group_of(pod))}
    if not groups:
        return items
    gangs: dict[str, list[DemandItem]] = {}
    for item in items:
        group = groups.get(PodUid(item.key.removeprefix("pod/")), "")
        if group and item.source is DemandSource.PENDING_POD:
            gangs.setdefault(group, []).append(item)
    together: dict[str, DemandItem] = {}
    for gang, members in gangs.items():
        minima = (_count_min(pods[PodUid(each.key.removeprefix("pod/"))]) for each in members)
        known = [each for each in minima if each is not None]
        together.update(_as_gang(gang, members, max(known, default=None), pods))
    return [together.get(item.key, item) for item in items]


def _as_gang(
    gang: str, members: list[DemandItem], count_min: int | None, pods: Mapping[PodUid, PodObserved]
) -> dict[str, DemandItem]:
    """The members by key: those that the group needs to start as a gang, the rest as they were."""
    priority, since = max(each.priority for each in members), min(each.since for each in members)
    needed_count = len(members)
    blocked: DeferReason | None = None
    if count_min is not None:
        bound_count = _bound_counts(pods)[gang]
        needed_count = max(0, count_min - bound_count)
        if needed_count > len(members):
            there = len(members) + bound_count
            blocked = GroupIncomplete(group=gang, members_present=there, members_count_min=count_min)
    first = sorted(members, key=lambda each: (-each.priority, each.since, each.key))[:needed_count]
    hurry = min((each.start_by_at for each in members if each.start_by_at is not None), default=None)
    within = next(filter(None, (_within(pods[PodUid(each.key.removeprefix("pod/"))]) for each in first)), None)
    blocked = blocked or next((each.blocked for each in first if each.blocked is not None), None)
    return {
        each.key: msgspec.structs.replace(
            each, gang=gang, priority=priority, since=since, blocked=blocked, within=within, start_by_at=hurry
        )
        for each in first
    }


def group_of(pod: PodObserved) -> str:
    """`group/<namespace>/<name>` of a pod that names one; empty: none. Jobs of ours start together by themselves."""
    if pod.job_id is not None:
        return ""
    said = {key: value for key, value in (*pod.annotations, *pod.labels) if value and key in _KEYS}
    name = next((said[key] for key in _KEYS if key in said), "")
    is_none = not name or name.startswith(labels.POD_GROUP_GENERATED_PREFIX)
    return "" if is_none else f"group/{pod.namespace}/{name}"


def _count_min(pod: PodObserved) -> int | None:
    """How many of its group start together: by the group's object, else as the pod itself says."""
    if pod.group_count_min is not None:
        return pod.group_count_min
    said = dict((*pod.annotations, *pod.labels))
    return next((int(said[key]) for key in _MINIMA if said.get(key, "").isdigit()), None)


def _within(pod: PodObserved) -> str | None:
    """The label whose value the nodes of all members share; None: they may be apart."""
    said = dict(pod.annotations)
    return next((said[key] for key in labels.GANG_WITHIN if said.get(key)), None)


@remembered(4)
def _bound_counts(pods: Mapping[PodUid, PodObserved]) -> Counter[str]:
    """How many pods of each group have a node, or have done their part."""
    return Counter(
        group
        for pod in pods.values()
        if pod.node_name is not None
        and pod.phase != "failed"
        and pod.deleting_since is None
        and (group := group_of(pod))
    )
