"""The life of a node as phases, from the decision to buy it to the cloud's word that it is gone.

A phase is never stored: it is computed from what each stream said (order, instance, Kubernetes node, drain), so it
is the same in whichever order the streams arrived. Streams may be late, so a reader may see a node skip phases; it
never sees it go against the arrows (`core/nodes/transitions.py`).

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

Counting: against limits and money a purchase counts from `planned` until the cloud said that its instance is gone or
never was. As room it counts from `planned` until `ready`, or its deadline, and then as long as it is `ready`.
"""

import enum
from datetime import datetime

from gpu_autoscaler.core.nodes.correlation import Correlation, NodeRecords, RecordIndex
from gpu_autoscaler.core.state.state import DrainRecord
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import ReleaseInstance


class NodePhase(enum.StrEnum):
    """Where a node is in its life."""

    PLANNED = "planned"  # decided, not yet ordered
    ORDERED = "ordered"  # the cloud is being asked
    LAUNCHED = "launched"  # an instance exists and costs money
    REGISTERED = "registered"  # Kubernetes has the node; not ready, or its GPUs are not allocatable yet
    READY = "ready"  # takes pods, with every GPU that was promised
    CORDONED = "cordoned"  # takes no new pods; a drain is decided, or somebody cordoned it
    DRAINING = "draining"  # its pods are told to go
    DRAINED = "drained"  # no pod that counts is left
    TERMINATING = "terminating"  # the instance is being ended
    GONE = "gone"  # the cloud confirmed that the instance is gone
    FAILED = "failed"  # refused, or past its deadline without a node that is or was usable: to be given back
    LOST = "lost"  # was there, and fell silent or was ended without our word


BOOTING_PHASES = frozenset({NodePhase.PLANNED, NodePhase.ORDERED, NodePhase.LAUNCHED, NodePhase.REGISTERED})
LEAVING_PHASES = frozenset({NodePhase.DRAINING, NodePhase.DRAINED, NodePhase.TERMINATING})


def is_counted(records: NodeRecords, index: RecordIndex) -> bool:
    """True until the cloud confirmed that the instance is gone or never was."""
    if index.is_closed(records):
        return False
    if records.instance is not None:
        return records.instance.state != "terminated"
    return records.order is None or records.order.refused is None


def phase_of(records: NodeRecords, correlation: Correlation, as_of: datetime) -> NodePhase:
    """Return the phase that the evidence amounts to; the strongest evidence comes first."""
    order, node, drain = records.order, records.node, correlation.drain_of(records)
    if correlation.is_closed(records):
        return NodePhase.GONE if node is None else NodePhase.TERMINATING
    is_late = records.deadline_at is not None and as_of >= records.deadline_at
    if records.instance is not None and records.instance.state == "terminated":
        if order is None and node is None:
            return NodePhase.GONE
        if drain is not None:
            return NodePhase.TERMINATING
        # Our books are still open; as a failure the order is given back, which closes them.
        return NodePhase.FAILED if node is None and is_late else NodePhase.LOST
    # Without a node only a release is left, or a drain that has emptied it: either ends the instance.
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
    if node.is_ready and records.has_its_gpus(node.allocatable) and (was_usable or not node.is_starting):
        return NodePhase.READY
    if was_usable:
        return NodePhase.LOST
    if records.deadline_at is not None and as_of >= records.deadline_at:
        return NodePhase.FAILED
    return NodePhase.REGISTERED
