"""Lifecycle of a node in phases, from the decision to buy it until the cloud confirms its end.

A phase is never stored. It is derived from the records of all streams (order, instance, Kubernetes node, drain), so it
does not depend on the order of arrival. A late stream may make a node skip phases, but never move against the arrows
(`tests/support/node_transitions.py`).

    planned ──► ordered ──► launched ──► registered ──► ready ◄──► lost
       │           │            │            │         ▲     │
       │           │            │            │         ▼     │
       │           │            │            └────► cordoned │
       │           │            │                      │     │
       └───────────┴────────────┴──► failed         draining ┘
                                       │               │
                                       │            drained
                                       │               │
                                       └────────► terminating ──► gone

A purchase counts against limits and budgets from `planned` until the cloud confirms that its instance is terminated or
was never launched. It counts as capacity while it is booting, up to its deadline, and while it is `ready`.
"""

import enum
from datetime import datetime

from gpu_autoscaler.core.nodes.correlation import Correlation, NodeRecords, RecordIndex
from gpu_autoscaler.core.state.state import DrainRecord
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import ReleaseInstance


class NodePhase(enum.StrEnum):
    """Lifecycle phase of a node."""

    PLANNED = "planned"  # decided, not yet ordered
    ORDERED = "ordered"  # the launch is in progress
    LAUNCHED = "launched"  # the instance exists and is billed
    REGISTERED = "registered"  # the node object exists; not ready, or GPUs are not allocatable yet
    READY = "ready"  # accepts pods, with all promised GPUs
    CORDONED = "cordoned"  # unschedulable; by a planned drain or by a user
    DRAINING = "draining"  # its pods are being evicted
    DRAINED = "drained"  # no workload pod is left
    TERMINATING = "terminating"  # the instance is being terminated
    GONE = "gone"  # the cloud confirmed the end of the instance
    FAILED = "failed"  # refused, or never usable by its deadline: to be released
    LOST = "lost"  # stopped reporting, or was terminated by others


BOOTING_PHASES = frozenset({NodePhase.PLANNED, NodePhase.ORDERED, NodePhase.LAUNCHED, NodePhase.REGISTERED})
LEAVING_PHASES = frozenset({NodePhase.DRAINING, NodePhase.DRAINED, NodePhase.TERMINATING})


def is_counted(records: NodeRecords, index: RecordIndex) -> bool:
    """True until the cloud confirms that the instance is terminated or was never launched."""
    if index.is_closed(records):
        return False
    if records.instance is not None:
        return records.instance.state != "terminated"
    return records.order is None or records.order.refused is None


def phase_of(records: NodeRecords, correlation: Correlation, as_of: datetime) -> NodePhase:
    """Return the phase; the strongest evidence is checked first."""
    order, node, drain = records.order, records.node, correlation.drain_of(records)
    if correlation.is_closed(records):
        return NodePhase.GONE if node is None else NodePhase.TERMINATING
    is_late = records.deadline_at is not None and as_of >= records.deadline_at
    if records.instance is not None and records.instance.state == "terminated":
        if order is None and node is None:
            return NodePhase.GONE
        if drain is not None:
            return NodePhase.TERMINATING
        # The order is still open; as failed it is released, which closes it.
        return NodePhase.FAILED if node is None and is_late else NodePhase.LOST
    # Without a node object, a release or a completed drain terminates the instance.
    if drain is not None and (node is None or isinstance(drain.decision, ReleaseInstance)):
        return NodePhase.TERMINATING
    if records.instance is not None and records.instance.state == "terminating":
        return NodePhase.TERMINATING
    if node is not None:
        return _phase_in_kubernetes(node, drain, records, correlation, as_of)
    if order is not None and order.refused is not None:
        return NodePhase.FAILED
    if is_late:
        return NodePhase.FAILED
    if correlation.has_lost_node(records) or correlation.is_missing(records):
        return NodePhase.LOST
    if records.instance is not None or (order is not None and order.launched is not None):
        return NodePhase.LAUNCHED
    return NodePhase.ORDERED if order is not None and order.ordered is not None else NodePhase.PLANNED


def _phase_in_kubernetes(
    node: NodeObserved, drain: DrainRecord | None, records: NodeRecords, correlation: Correlation, as_of: datetime
) -> NodePhase:
    if node.deleting_since is not None:
        return NodePhase.TERMINATING
    if drain is not None and drain.drained is not None:
        return NodePhase.DRAINED
    if drain is not None and drain.started is not None:
        return NodePhase.DRAINING
    if drain is not None or node.is_cordoned:
        return NodePhase.CORDONED
    if correlation.is_missing(records):
        return NodePhase.LOST
    was_usable = correlation.usable_of(records) is not None
    if node.is_ready and records.has_promised_gpus(node.allocatable) and (was_usable or not node.is_starting):
        return NodePhase.READY
    if was_usable:
        return NodePhase.LOST
    if records.deadline_at is not None and as_of >= records.deadline_at:
        return NodePhase.FAILED
    return NodePhase.REGISTERED
