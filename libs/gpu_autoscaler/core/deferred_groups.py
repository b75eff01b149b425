"""What a plan defers, in groups: a published plan has a bounded size, however much waits and for whatever reason.

`grouped` makes the groups of a plan, `ungrouped` finds the group of each object again, by the same rule: an object is
a member of the group that lists its digest. Of waiting pods and jobs the largest group of each shape lists none: it has
those that no other group of the shape lists.
"""

import hashlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.sources import group_of
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.queries import is_waiting
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import Deferred, DeferredGroup, Plan
from gpu_autoscaler.model.format import counted, subject_kind
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import Resources

GROUPS_COUNT_MAX = 200
GROUPS_BYTES_MAX = 64 * 1024  # of all groups of a plan, as JSON
EXAMPLES_COUNT = 3
DIGEST_BYTES = 6  # among 20,000 objects, one in a million plans has two of equal digest
UNLISTED_COUNT_MIN = 65  # a smaller group lists all its members
_SELECTORS_COUNT_MAX = 3
# Kinds of objects that the state names; of any other kind a group has all subjects.
_RESOLVED_KINDS = frozenset({"pod", "job", "member", "demand", "group", "provisioning", "node", "order", "action"})


class Traits(NamedTuple):
    """What the groups say about an object."""

    shape: str = ""
    gpu_count: int = 0
    # Since when it certainly waits for a plan to serve or defer it; None: it may be in no group.
    waits_since: Instant | None = None


NO_TRAITS = Traits()


class _Object(NamedTuple):
    deferred: Deferred
    traits: Traits


# ---- grouping


def grouped(plan: Plan, state: ClusterState) -> Plan:
    """Return the plan with groups in place of its deferred objects. The state is that of the plan.

    As long as they fit, groups have one reason and one shape each. If not, reasons that differ in values alone share a
    group; then also shapes. What still does not fit is counted by reason.
    """
    first: dict[tuple[str, str], Deferred] = {}
    for deferred in plan.deferred:
        first.setdefault((deferred.step, deferred.subject), deferred)
    traits = TraitsReader(state)
    objects = [_Object(deferred, traits.of(deferred.subject)) for deferred in first.values()]
    steps = Counter(deferred.subject for deferred in first.values())
    named = _bought_for(plan).union(subject for subject, count in steps.items() if count > 1)
    alike = _alike(objects)
    groups: list[DeferredGroup] = []
    for key_of in (_by_reason, _by_tag, _by_tag_of_any_shape):
        keyed, is_by_shape = _keyed(alike, key_of), key_of is not _by_tag_of_any_shape
        if len(keyed) > GROUPS_COUNT_MAX and is_by_shape:
            continue
        groups = _without_largest(keyed, named, is_by_shape=is_by_shape)
        if len(groups) <= GROUPS_COUNT_MAX and _size_bytes(groups) <= GROUPS_BYTES_MAX:
            return msgspec.structs.replace(plan, deferred=(), deferred_groups=tuple(groups))
    kept, dropped = _cut(groups)
    return msgspec.structs.replace(plan, deferred=(), deferred_groups=tuple(kept), deferred_unlisted=_by_tags(dropped))


def without_groups(plan: Plan) -> Plan:
    """Return the plan with what it defers as numbers alone."""
    unlisted = Counter(dict(plan.deferred_unlisted)) + Counter(dict(_by_tags(plan.deferred_groups)))
    return msgspec.structs.replace(
        plan, deferred=(), deferred_groups=(), deferred_unlisted=tuple(sorted(unlisted.items()))
    )


def like_recorded(made: Plan, recorded: Plan, state: ClusterState) -> Plan:
    """Return a plan as it was made in the form of a recorded one of the same state, to compare the two."""
    if recorded.upkeep is None:
        made = msgspec.structs.replace(made, upkeep=None)  # by a release that acted without a record
    if recorded.deferred:
        return made  # recorded before there were groups
    published = grouped(made, state)
    is_without = recorded.deferred_unlisted and not recorded.deferred_groups
    return without_groups(published) if is_without else published


def reason_counts(plan: Plan) -> Mapping[str, int]:
    """Return how many objects the plan defers, by reason tag; an object counts once for each step that defers it."""
    counts = Counter(dict(plan.deferred_unlisted))
    counts.update(deferred.reason.tag() for deferred in plan.deferred)
    counts.update(dict(_by_tags(plan.deferred_groups)))
    for deferred in plan.upkeep_deferred:
        counts[deferred.reason.tag()] += deferred.objects_count
    return counts


def _bought_for(plan: Plan) -> frozenset[str]:
    bought = (decision.reason for decision in plan.purchases)
    return frozenset(key for reason in bought for key in getattr(reason, "demand", ()))


def _by_tags(groups: Iterable[DeferredGroup]) -> tuple[tuple[str, int], ...]:
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.reason.tag()] += group.objects_count
    return tuple(sorted(counts.items()))


def _by_reason(deferred: Deferred, shape: str) -> Hashable:
    return deferred.step, deferred.reason, subject_kind(deferred.subject), shape


def _by_tag(deferred: Deferred, shape: str) -> Hashable:
    return deferred.step, deferred.reason.tag(), subject_kind(deferred.subject), shape


def _by_tag_of_any_shape(deferred: Deferred, _: str) -> Hashable:
    return deferred.step, deferred.reason.tag(), subject_kind(deferred.subject)


def _alike(objects: Iterable[_Object]) -> list[list[_Object]]:
    """Return the objects that share step, reason, kind and shape: few reasons are shared by many objects."""
    by_identity: dict[tuple[str, int, str, str], list[_Object]] = {}
    for entry in objects:
        deferred = entry.deferred
        identity = (deferred.step, id(deferred.reason), subject_kind(deferred.subject), entry.traits.shape)
        by_identity.setdefault(identity, []).append(entry)
    return list(by_identity.values())


def _keyed(alike: Iterable[list[_Object]], key_of: Callable[[Deferred, str], Hashable]) -> list[list[_Object]]:
    """Return the objects of each group, groups in the order of the plan."""
    keyed: dict[Hashable, list[_Object]] = {}
    for entries in alike:
        keyed.setdefault(key_of(entries[0].deferred, entries[0].traits.shape), []).extend(entries)
    return list(keyed.values())


def _without_largest(
    keyed: Sequence[list[_Object]], named: frozenset[str], *, is_by_shape: bool
) -> list[DeferredGroup]:
    """Return the groups. The largest of each shape lists only members that could not be found otherwise: the `named`
    ones, and those that do not certainly wait."""
    largest: dict[tuple[str, str], int] = {}
    for number, entries in enumerate(keyed):
        kind = subject_kind(entries[0].deferred.subject)
        if kind in ("pod", "job") and len(entries) >= UNLISTED_COUNT_MIN:
            scope = (kind, entries[0].traits.shape if is_by_shape else "")
            if scope not in largest or len(keyed[largest[scope]]) < len(entries):
                largest[scope] = number
    unlisted = frozenset(largest.values())
    return [_group(entries, named, is_unlisted=number in unlisted) for number, entries in enumerate(keyed)]


def _group(entries: Sequence[_Object], named: frozenset[str], *, is_unlisted: bool) -> DeferredGroup:
    first = entries[0].deferred
    kind = subject_kind(first.subject)
    subjects = sorted(entry.deferred.subject for entry in entries)
    listed: Sequence[str] = ()
    if kind in _RESOLVED_KINDS:
        listed = subjects if len(subjects) > EXAMPLES_COUNT else ()
        subjects = subjects[:EXAMPLES_COUNT]
    if is_unlisted:
        listed = [
            entry.deferred.subject
            for entry in entries
            if entry.traits.waits_since is None or entry.deferred.subject in named
        ]
    shapes = {entry.traits.shape for entry in entries}
    return DeferredGroup(
        step=first.step,
        kind=kind,
        reason=first.reason,
        reasons_count=_different_count(entries),
        shape=shapes.pop() if len(shapes) == 1 else "",
        objects_count=len(entries),
        gpu_count=sum(entry.traits.gpu_count for entry in entries),
        subjects=tuple(subjects),
        members=b64encode(b"".join(sorted(map(digest, listed)))).decode(),
    )


def _different_count(entries: Sequence[_Object]) -> int:
    distinct = {id(entry.deferred.reason): entry.deferred.reason for entry in entries}
    return 1 if len(distinct) == 1 else len(set(distinct.values()))


@lru_cache(maxsize=65536)
def digest(subject: str) -> bytes:
    """Return the digest by which a group lists this object."""
    return hashlib.blake2b(subject.encode(), digest_size=DIGEST_BYTES).digest()


def _size_bytes(groups: Sequence[DeferredGroup]) -> int:
    return len(msgspec.json.encode(groups))


def _cut(groups: Sequence[DeferredGroup]) -> tuple[list[DeferredGroup], list[DeferredGroup]]:
    """Return the groups that fit, in their order, and the others.

    First the longest lists of members are dropped, then the groups of the fewest objects.
    """
    ranked = sorted(range(len(groups)), key=lambda number: (-groups[number].objects_count, number))[:GROUPS_COUNT_MAX]
    kept = {number: groups[number] for number in sorted(ranked)}
    sizes = {number: _size_bytes([group]) for number, group in kept.items()}
    for number in sorted(kept, key=lambda number: (-len(kept[number].members), number)):
        if sum(sizes.values()) <= GROUPS_BYTES_MAX:
            break
        kept[number] = msgspec.structs.replace(kept[number], members="")
        sizes[number] = _size_bytes([kept[number]])
    for number in reversed(ranked):
        if sum(sizes.values()) <= GROUPS_BYTES_MAX:
            break
        del kept[number], sizes[number]
    return list(kept.values()), [group for number, group in enumerate(groups) if number not in kept]


# ---- finding the group of an object


class DeferredLookup:
    """The groups of one plan by object. For a plan without groups: what it defers, by object."""

    def __init__(self, plan: Plan) -> None:
        self._as_of = plan.as_of
        self._bought_for = _bought_for(plan)
        self._single: dict[str, list[Deferred]] = {}
        for deferred in plan.deferred:
            self._single.setdefault(deferred.subject, []).append(deferred)
        self._listing: dict[bytes, list[DeferredGroup]] = {}
        self._unlisted: dict[str, list[DeferredGroup]] = {}  # by kind
        for group in plan.deferred_groups:
            keys = member_digests(group)
            for key in keys:
                self._listing.setdefault(key, []).append(group)
            if len(keys) < group.objects_count:
                self._unlisted.setdefault(group.kind, []).append(group)

    def of(self, subject: str, traits: Traits = NO_TRAITS) -> tuple[Deferred, ...]:
        """Return what the plan defers for the object, in the order of the steps; empty: nothing."""
        if subject in self._single:
            return tuple(self._single[subject])
        groups = [group for group in self._listing.get(digest(subject), ()) if group.kind == subject_kind(subject)]
        if not groups and self._may_be_unlisted(subject, traits):
            same = (group for group in self._unlisted[subject_kind(subject)] if group.shape in ("", traits.shape))
            groups = sorted(same, key=lambda group: -group.objects_count)[:1]
        return tuple(Deferred(step=group.step, subject=subject, reason=group.reason) for group in groups)

    def _may_be_unlisted(self, subject: str, traits: Traits) -> bool:
        is_covered = traits.waits_since is not None and traits.waits_since <= self._as_of
        return is_covered and subject not in self._bought_for and subject_kind(subject) in self._unlisted


def member_digests(group: DeferredGroup) -> frozenset[bytes]:
    """Return the digests of the members that the group lists, by name or by digest."""
    listed = b64decode(group.members)
    places = range(0, len(listed), DIGEST_BYTES)
    return frozenset((*map(digest, group.subjects), *(listed[place : place + DIGEST_BYTES] for place in places)))


@cached_by_identity(8)
def deferred_lookup(plan: Plan) -> DeferredLookup:
    """Return the lookup of the plan."""
    return DeferredLookup(plan)


def ungrouped(plan: Plan, state: ClusterState) -> tuple[Deferred, ...]:
    """Return what the plan defers, one entry for each object of the state or named by a group, and step."""
    if not plan.deferred_groups:
        return plan.deferred
    lookup, traits = deferred_lookup(plan), TraitsReader(state)
    kinds = {group.kind for group in plan.deferred_groups}
    known = (subject for subject in traits.subjects() if subject_kind(subject) in kinds)
    subjects = dict.fromkeys((*(name for group in plan.deferred_groups for name in group.subjects), *known))
    return tuple(deferred for subject in subjects for deferred in lookup.of(subject, traits.of(subject)))


# ---- what the groups say about an object


class TraitsReader:
    """Reads the traits of objects from a state."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    @cached_property
    def _with_pods(self) -> frozenset[JobId | None]:
        return frozenset(pod.job_id for pod in self._state.pods.values())

    def of(self, subject: str) -> Traits:
        """Return the traits of the object; empty ones where the state does not have it."""
        kind, _, name = subject.partition("/")
        match kind:
            case "pod":
                pod = self._state.pods.get(PodUid(name))
                return NO_TRAITS if pod is None else pod_traits(pod)
            case "job":
                return self._job(JobId(name))
            case "member":
                job = self._state.jobs.get(JobId(name.rpartition("/")[0]))
                spec = None if job is None or job.queued is None else job.queued.spec
                return NO_TRAITS if spec is None else _members_traits(spec, 1)
            case "node":
                node = self._state.nodes.get(NodeUid(name))
                if node is None:
                    return NO_TRAITS
                type_name = f"{node.instance_type or 'unknown type'}, {node.capacity_type or 'unknown capacity type'}"
                return Traits(shape=type_name, gpu_count=node.allocatable.gpu_count)
            case "order" | "action":
                order = self._state.orders.get(ActionId(name))
                return NO_TRAITS if order is None or order.decision is None else _offer_traits(order.decision.offer)
            case _:
                return NO_TRAITS

    def _job(self, job_id: JobId) -> Traits:
        job = self._state.jobs.get(job_id)
        if job is None or job.queued is None:
            return NO_TRAITS
        is_certain = is_waiting(job) and job_id not in self._with_pods
        return job_traits(job.queued.spec, waits_since=job.queued.queued_at if is_certain else None)

    def subjects(self) -> Iterator[str]:
        """Yield the subject of each object that a plan may defer."""
        state = self._state
        for pod in state.pods.values():
            yield f"pod/{pod.pod_uid}"
        yield from {group for pod in state.pods.values() if pod.node_name is None and (group := group_of(pod))}
        for job_id, job in state.jobs.items():
            yield f"job/{job_id}"
            if job.queued is not None and job.finished is None:
                spec = job.queued.spec
                yield from (f"member/{job_id}/{number}" for number in range(spec.gang_count + 1, spec.member_count + 1))
        for source, record in state.reported_demand.items():
            yield from (f"demand/{source}/{number}" for number in range(1, (record.reported.count or 0) + 1))
        for uid, request in state.provisioning.items():
            yield f"provisioning/{uid}"
            yield from (f"provisioning/{uid}/{number}" for number in range(len(request.pod_sets)))
        yield from (f"node/{node_uid}" for node_uid in state.nodes)
        for action_id in state.orders:
            yield f"order/{action_id}"
            yield f"action/{action_id}"


def pod_traits(pod: PodObserved) -> Traits:
    """Return the traits of a pod as observed."""
    waits = pod.phase == "pending" and pod.node_name is None and pod.deleting_since is None and not pod.is_gated
    is_wanted = waits and pod.owner_kind not in ("DaemonSet", "Node")
    models = pod.gpu_models or (() if pod.gpu_model is None else (pod.gpu_model,))
    gang = "in a gang" if group_of(pod) else ""
    return Traits(
        shape=_work_shape(pod.requests, models, pod.demands.node_selector[:_SELECTORS_COUNT_MAX], gang),
        gpu_count=pod.requests.gpu_count,
        waits_since=pod.unschedulable_since if is_wanted else None,
    )


def job_traits(spec: JobSpec, *, waits_since: Instant | None) -> Traits:
    """Return the traits of a job with this spec."""
    return _members_traits(spec, spec.gang_count)._replace(waits_since=waits_since)


def _members_traits(spec: JobSpec, members_count: int) -> Traits:
    gang = f"gang of {members_count}" if members_count > 1 else ""
    return Traits(
        shape=_work_shape(spec.member_resources, spec.models, (), gang),
        gpu_count=members_count * spec.member_resources.gpu_count,
    )


def _offer_traits(offer: Offer) -> Traits:
    return Traits(shape=f"{offer.instance_type}, {offer.capacity_type}", gpu_count=offer.resources.gpu_count)


@lru_cache(maxsize=4096)
def _work_shape(resources: Resources, models: tuple[str, ...], selector: tuple[tuple[str, str], ...], gang: str) -> str:
    """Return the shape in words: `8 GPUs (A100), 96 CPUs, 512 GiB, gang of 4`."""
    gpus = [counted(resources.gpu_count, "GPU")] if resources.gpu_count else []
    parts = [*gpus, *(f"{count} {name}" for name, count in resources.slices)]
    if models and parts:
        parts[-1] += f" ({' or '.join(models[:EXAMPLES_COUNT])})"
    cpus, gibibytes = resources.cpu_milli / 1000, resources.memory_bytes / 2**30
    parts += [f"{cpus:g} {'CPU' if cpus == 1 else 'CPUs'}"] if cpus else []
    parts += [f"{gibibytes:.4g} GiB"] if gibibytes else []
    parts += [f"{key}={value}" for key, value in selector]
    return ", ".join([*parts, *filter(None, [gang])])
