"""What protects a pod or node from disruption by choice. Notices, expiry and deletion by users ignore it.

Respected: `do-not-disrupt`, cluster-autoscaler's `safe-to-evict` and `scale-down-disabled`, PodDisruptionBudgets, pods
without a controller, local data, and work that would start over; work that saves checkpoints is asked to save first.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gpu_autoscaler.core.placement.label_matching import holds
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import OWNERS_TO_COMPLETION
from gpu_autoscaler.model.observed import go_duration

# ---- checkpoints
# The contract with jobs: a pod that saves on request carries the annotation `checkpointed-at` from its start, empty
# until its first save, and writes the instant of each save there (RFC 3339). The annotation `checkpoint-requested` with
# the deadline requests a save, and `checkpoint-requested-at` dates it; the pod has answered once it has saved since.

# Clocks of nodes differ a little, and a save just before the request is as good as one after it.
ANSWER_SECONDS_BEFORE = 5.0


def can_save(annotations: Mapping[str, str]) -> bool:
    """True for a pod that saves on request and reports its saves."""
    return labels.CHECKPOINTED_AT in annotations


def checkpointed_at(annotations: Mapping[str, str]) -> datetime | None:
    """Return when the pod last saved; None: never, or the annotation is invalid."""
    return annotated_instant(annotations, labels.CHECKPOINTED_AT)


def request_annotations(requested_at: datetime, deadline_at: datetime) -> dict[str, str]:
    """Return the annotations that ask a pod to save by the deadline."""
    return {
        labels.CHECKPOINT_REQUESTED: deadline_at.isoformat(),
        labels.CHECKPOINT_REQUESTED_AT: requested_at.isoformat(),
    }


class SaveRequest(NamedTuple):
    """The last request to a pod to save."""

    requested_at: datetime  # its deadline, for a request of 0.2
    deadline_at: datetime


def save_request(annotations: Mapping[str, str]) -> SaveRequest | None:
    """Return the last request to the pod; None: there was none, or the annotation is invalid."""
    deadline_at = annotated_instant(annotations, labels.CHECKPOINT_REQUESTED)
    if deadline_at is None:
        return None
    return SaveRequest(annotated_instant(annotations, labels.CHECKPOINT_REQUESTED_AT) or deadline_at, deadline_at)


def annotated_instant(annotations: Mapping[str, str], key: str) -> datetime | None:
    """Return the instant of this annotation; None: it is missing or invalid."""
    try:
        at = datetime.fromisoformat(annotations.get(key, ""))
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def has_answered(annotations: Mapping[str, str], requested_at: datetime) -> bool:
    """True once the pod has saved for a request of this instant."""
    saved_at = checkpointed_at(annotations)
    return saved_at is not None and saved_at >= requested_at - timedelta(seconds=ANSWER_SECONDS_BEFORE)


_DO_NOT_DISRUPT_KEYS = (labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT)


def pod_protection(pod: PodObserved, budgets: Iterable[PodBudgetObserved], as_of: datetime) -> str | None:
    """Return what protects the pod from being moved by choice; None: nothing does. Pods of the node itself and finished
    pods are never protected."""
    if not counts_for_idleness(pod):
        return None
    annotations = dict(pod.annotations)
    return (
        _do_not_disrupt(annotations, pod.started_at or pod.created_at, as_of)
        or _annotated(annotations, labels.SAFE_TO_EVICT, "false")
        or exhausted_budget(pod, budgets)
        or (None if annotations.get(labels.SAFE_TO_EVICT) == "true" else _loss(pod))
    )


def pod_mark(pod: PodObserved, budgets: Iterable[PodBudgetObserved], as_of: datetime) -> str | None:
    """Return what protects the pod regardless of cost: annotations, budgets and ownership, not the loss of work; None:
    nothing does."""
    annotations = dict(pod.annotations)
    return (
        _do_not_disrupt(annotations, pod.started_at or pod.created_at, as_of)
        or _annotated(annotations, labels.SAFE_TO_EVICT, "false")
        or exhausted_budget(pod, budgets)
        or ("it has no controller that would recreate it" if pod.owner_kind is None else None)
    )


def node_protection(node: NodeObserved, as_of: datetime) -> str | None:
    """Return what protects the node from being removed by choice; None: nothing does."""
    annotations = dict(node.annotations)
    return _do_not_disrupt(annotations, node.created_at, as_of) or _annotated(
        annotations, labels.SCALE_DOWN_DISABLED, "true"
    )


def covering_budgets(pod: PodObserved, budgets: Iterable[PodBudgetObserved]) -> tuple[PodBudgetObserved, ...]:
    """Return the PodDisruptionBudgets in the pod's namespace whose selector matches it."""
    pod_labels = dict(pod.labels)
    return tuple(
        budget
        for budget in budgets
        if budget.namespace == pod.namespace
        and all(holds(requirement, pod_labels.get(requirement.key)) for requirement in budget.match_labels)
    )


def exhausted_budget(pod: PodObserved, budgets: Iterable[PodBudgetObserved]) -> str | None:
    """Return which PodDisruptionBudget blocks the pod's eviction now; None: none does."""
    exhausted = (budget.name for budget in covering_budgets(pod, budgets) if budget.disruptions_allowed <= 0)
    name = min(exhausted, default=None)
    return None if name is None else f"disruption budget {pod.namespace}/{name} allows no disruption"


def _loss(pod: PodObserved) -> str | None:
    if pod.owner_kind is None:
        return "it has no controller that would recreate it"
    # Repeated work soon costs more than is saved; safe-to-evict overrides this.
    if pod.owner_kind in OWNERS_TO_COMPLETION and not can_save(dict(pod.annotations)):
        return "it runs to completion and would start over"
    return "its local storage would be lost" if pod.has_local_storage else None


def _annotated(annotations: Mapping[str, str], key: str, value: str) -> str | None:
    return f"annotation {key}={value}" if annotations.get(key) == value else None


def _do_not_disrupt(annotations: Mapping[str, str], since: datetime, as_of: datetime) -> str | None:
    for key in _DO_NOT_DISRUPT_KEYS:
        value = annotations.get(key)
        if value is None or value == "false":
            continue
        duration = go_duration(value)
        # An invalid value was meant to protect, and does until it is corrected.
        if value == "true" or duration is None or as_of < since + duration:
            return f"annotation {key}={value}"
    return None
