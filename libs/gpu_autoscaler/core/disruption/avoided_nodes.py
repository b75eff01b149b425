"""Nodes that new pods avoid, so that they become empty: step `upkeep` decides their taint `PreferNoSchedule`.

kube-scheduler spreads pods over all nodes with free capacity, and each of them stays as long as it gets new ones. It
prefers nodes without the taint, and uses the others when those are full. Open to new pods are the nodes that cost least
for each workload on them, as many as one more of the largest pods would need; all others with free GPUs are avoided.

Only for pods that do not tolerate the taint: jobs of the queue do, as the scheduler names their nodes. The order of
nodes and the number of open ones are ours; the taint is that of cluster-autoscaler's
`DeletionCandidateOfClusterAutoscaler` (cluster-autoscaler FAQ, "How does scale-down work?", read 2026-11-29).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.nodes.views import NodeView, Selected, node_views
from gpu_autoscaler.core.placement.kept_nodes import WITH_FREE_GPUS, KeptNode
from gpu_autoscaler.core.placement.label_matching import avoided as avoided_by
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.lineage import Changes, Derivation
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import NodeUid, PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.scheduling import Taint

_TAINT = Taint(key=labels.AVOID_TAINT, effect="PreferNoSchedule")
# An avoided node is opened only if it costs this much less than an open one, so that few taints change.
_CLEARLY_LESS_RATIO = 0.95


def is_avoided(taints: Iterable[Taint]) -> bool:
    """True for a node with our taint."""
    return any(taint.key == labels.AVOID_TAINT for taint in taints)


class TaintChange(NamedTuple):
    """A node whose taint is to be added or removed."""

    node_uid: NodeUid
    node_name: str
    cause: Literal["cheapest", "no_pods", "policy"] | None  # why it is removed; None: it is added
    node_micro_usd_per_hour: int = 0  # price of the node, shared by its workloads and one more
    open_micro_usd_per_hour: int = 0  # likewise, of the most expensive open node


def taint_changes(state: ClusterState, policy: ScalingPolicy, as_of: Instant) -> tuple[TaintChange, ...]:
    """Return the nodes whose taint is not as it should be: first those to be opened, then those that cost most."""
    views = node_views(state, as_of)
    return _changes(views.table(WITH_FREE_GPUS), views.table(_AVOIDED), _PLAIN_PODS.of(state).counts, policy)


_AVOIDED = Selected(lambda view: view.is_ours and view.node is not None and is_avoided(view.taints))


# ---- pods that do not tolerate the taint

_Kind = tuple[tuple[str, ...], int]  # the GPU models that a pod accepts, and its GPUs; no models: any


class _PlainPods(NamedTuple):
    """How many pods there are of each kind; the same counts while they do not change."""

    pods: Mapping[PodUid, PodObserved]
    counts: Mapping[_Kind, int]

    @classmethod
    def of(cls, state: ClusterState) -> "_PlainPods":
        kinds = (kind for pod in state.pods.values() if (kind := _kind(pod)) is not None)
        return cls(state.pods, Counter(kinds))

    def updated(self, state: ClusterState, changes: Changes) -> "_PlainPods":
        """Count the changed pods again."""
        more: Counter[_Kind] = Counter()
        for uid in changes["pods"]:
            before, now = _kind(self.pods.get(uid)), _kind(state.pods.get(uid))
            if before != now:
                more.update({now: 1} if now is not None else {})
                more.subtract({before: 1} if before is not None else {})
        if not any(more.values()):
            return _PlainPods(state.pods, self.counts)
        counts = Counter(self.counts)
        counts.update(more)
        return _PlainPods(state.pods, +counts)


_PLAIN_PODS = Derivation(("pods",), _PlainPods.of, _PlainPods.updated)


def _kind(pod: PodObserved | None) -> _Kind | None:
    if pod is None or not pod.requests.gpu_count or not counts_for_idleness(pod):
        return None
    if not avoided_by(pod.demands.tolerations, (_TAINT,)):
        return None
    models = pod.gpu_models or (() if pod.gpu_model is None else (pod.gpu_model,))
    return tuple(sorted(models)), pod.requests.gpu_count


# ---- which nodes they avoid


@cached_by_identity(2)
def _changes(
    kept: Mapping[str, KeptNode], avoided: tuple[NodeView, ...], counts: Mapping[_Kind, int], policy: ScalingPolicy
) -> tuple[TaintChange, ...]:
    if not policy.removal.is_avoid_taint_on or not counts:
        cause: Literal["no_pods", "policy"] = "no_pods" if policy.removal.is_avoid_taint_on else "policy"
        return tuple(TaintChange(view.node_uid, view.name, cause) for view in avoided if view.node_uid is not None)
    overhead = policy.node_overhead_micro_usd_per_hour
    priced = [
        _Priced(entry.shared_micro_usd_per_hour(overhead), entry, is_avoided(entry.view.taints))
        for entry in kept.values()
        if entry.view.is_usable and entry.view.drain is None and not _is_unused(entry)
    ]
    priced.sort(key=lambda one: (one.cost * (1.0 if one.is_avoided else _CLEARLY_LESS_RATIO), one.node.view.name))
    are_open = _open([one.node for one in priced], counts)
    open_cost = max((one.cost for one in priced if one.node.view.name in are_open), default=0.0)
    opened, closed = list[TaintChange](), list[TaintChange]()
    for one in priced:
        uid, name = one.node.view.node_uid, one.node.view.name
        if uid is not None and name in are_open and one.is_avoided:
            opened.append(TaintChange(uid, name, "cheapest"))
        elif uid is not None and name not in are_open and not one.is_avoided:
            closed.append(TaintChange(uid, name, None, round(one.cost), round(open_cost)))
    # Until one of them is open in fact, none is closed: new pods would have no preference at all.
    is_one_open = any(one.node.view.name in are_open and not one.is_avoided for one in priced)
    return (*opened, *reversed(closed)) if is_one_open else tuple(opened)


class _Priced(NamedTuple):
    """A node that has work and free GPUs."""

    cost: float  # micro-dollars an hour, shared by its workloads and one more
    node: KeptNode
    is_avoided: bool


def _is_unused(entry: KeptNode) -> bool:
    """True for a node that waits for the first work, for which it was bought."""
    empty_since, usable_since = entry.view.empty_since, entry.view.usable_since
    is_first = empty_since is not None and usable_since is not None and empty_since <= usable_since
    return not entry.jobs_count and is_first


def _open(in_order: Collection[KeptNode], counts: Mapping[_Kind, int]) -> set[str]:
    """Return the names of the first nodes whose free GPUs reach those of the largest pod, for each of the models that
    pods ask for."""
    largest: dict[tuple[str, ...], int] = {(): 1}  # the first node is open even if no pod accepts it
    for models, gpu_count in counts:
        largest[models] = max(gpu_count, largest.get(models, 0))
    names: set[str] = set()
    for models, gpu_count in sorted(largest.items()):
        missing_count = gpu_count
        for entry in in_order:
            if missing_count <= 0:
                break
            if not models or entry.view.gpu_model in models:
                names.add(entry.view.name)
                missing_count -= entry.free_gpu_count
    return names
