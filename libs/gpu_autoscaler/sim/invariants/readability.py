"""What is alive must be readable from the streams at any time, whatever they have discarded."""

from collections.abc import Collection, Mapping
from typing import Any

from gpu_autoscaler.core.state.queries import listed_instances
from gpu_autoscaler.core.state.retention import drain_ended_at, order_ended_at
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.events.node import NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodBudgetListed, PodBudgetObserved, PodListed, PodObserved
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDocumentsAccepted
from gpu_autoscaler.events.scaling import ScalingDrainStarted, ScalingNodeOrdered
from gpu_autoscaler.events.spot import SpotNoticeReceived

_SHOWN_COUNT_MAX = 3
Parts = tuple[object, ...]


class StateUnreadable(AssertionError):
    """A process that starts from the streams knows less of what is alive than one that read every fact."""


def living_differences(complete: ClusterState, rebuilt: ClusterState, folds: Collection[type[Fact]]) -> list[str]:
    """Return a line for each kind of living object of which less is known; with the first few names.

    Judges only kinds whose facts are folded. The rebuilt state may know more: what is published again tells of steps
    that a service does not fold.
    """
    expected, actual = _living(complete), _living(rebuilt)
    lines = []
    for (kind, fact_type), objects in expected.items():
        if fact_type not in folds:
            continue
        known = actual[kind, fact_type]
        names = sorted(name for name, parts in objects.items() if not _has(known.get(name), parts))
        if names:
            shown = ", ".join(names[:_SHOWN_COUNT_MAX])
            lines.append(f"{len(names)} of {len(objects)} {kind} unknown or older: {shown}")
    return lines


def _has(known: Parts | None, expected: Parts) -> bool:
    return known is not None and all(part is None or part == other for part, other in zip(expected, known, strict=True))


def _living(state: ClusterState) -> Mapping[tuple[str, type[Fact]], Mapping[Any, Parts]]:
    """Return what is known of each living object, by kind and the fact that services fold to know of it."""
    listed = frozenset[str]()
    if state.instances_listed_at is not None:
        listed = listed_instances(state.instances_seen_at, state.instances_listed_at)
    newest = state.newest.get("policy")
    return {
        ("pods", PodObserved): {key: (pod,) for key, pod in state.pods.items()},
        ("nodes", NodeObserved): {key: (node,) for key, node in state.nodes.items()},
        ("disruption budgets", PodBudgetObserved): {key: (budget,) for key, budget in state.budgets.items()},
        ("instances", NodeInstanceObserved): {
            key: (instance,) for key, instance in state.instances.items() if key in listed
        },
        ("notices", SpotNoticeReceived): {
            key: (record.notice,) for key, record in state.notices.items() if record.is_active
        },
        ("orders", ScalingNodeOrdered): {
            key: (order.decision, order.planned_at, order.ordered, order.launched)
            for key, order in state.orders.items()
            if order_ended_at(order) is None
        },
        ("drains", ScalingDrainStarted): {
            key: (drain.decision, drain.planned_at, drain.started, drain.drained, drain.cancel)
            for key, drain in state.drains.items()
            if drain_ended_at(drain) is None
        },
        ("jobs", JobQueued): {
            key: (job.queued, job.requested, job.cancel_requested, job.placed, job.preempted, job.started)
            for key, job in state.jobs.items()
            if job.queued is not None and job.finished is None
        },
        ("directives", PolicyDirectiveGiven): {
            key: (record.given,)
            for key, record in state.directives.items()
            if record.lifted is None and newest is not None and record.given.until > newest
        },
        # Without a list nothing is known to be absent.
        ("lists of pods", PodListed): {"pods": (state.pods_synced and True,)},
        ("lists of disruption budgets", PodBudgetListed): {"budgets": (state.budgets_synced and True,)},
        ("lists of nodes", NodeListed): {"nodes": (state.nodes_synced and True,)},
        ("lists of instances", NodeInstanceListed): {"instances": (state.instances_listed_at and True,)},
        ("policy documents", PolicyDocumentsAccepted): {"accepted": (state.policy_documents,)},
    }
