"""Bugs to plant in interruption notices, finalizers, orphaned nodes and gang placement. See `planted.py`."""

from tests.sim.planting import Planted

_SPOT = "services/gpu_autoscaler_services/spot_watcher"
_CORE = "libs/gpu_autoscaler/core"

# 4: every notice is received
_RECEIVED = (
    Planted(
        "metadata of spot nodes is not polled",
        4,
        f"{_SPOT}/metadata_poller.py",
        "node.capacity_type in (CapacityType.SPOT, None)",
        "node.capacity_type is None",
        profile="notices",
    ),
    Planted(
        "a queue message is deleted before its notice is published",
        4,
        f"{_SPOT}/interruption_queue.py",
        "self._new(provider_id, notice, event)]\n        if not facts:\n",
        "self._new(provider_id, notice, event)]\n        if True:\n",
        profile="queue",
    ),
    Planted(
        "a queue message is matched to no node",
        4,
        f"{_SPOT}/interruption_queue.py",
        "        if provider_id.endswith(suffix):\n",
        "        if False:\n",
        profile="queue",
        also=((f"{_SPOT}/interruption_queue.py", "node.provider_id.endswith(suffix):", "False:"),),
    ),
)

# 3: pods on a node deleted by hand are drained
_FINALIZERS = (
    Planted(
        "the finalizer of a deleted node is removed at once",
        3,
        f"{_CORE}/disruption/deleted_nodes.py",
        "        if view.node is not None and (is_karpenter_managed(view.node) or _has_ended(view, state))\n",
        "        if view.node is not None\n",
        profile="deleted nodes",
    ),
)

_ORPHANED_PATH = f"{_CORE}/disruption/orphaned_nodes.py"
_REMOVAL_PATH = "services/gpu_autoscaler_services/scaler/orphaned_nodes.py"

# 3: only nodes without an instance are removed
_ORPHANED = (
    Planted(
        "a node is removed after one incomplete instance list",
        3,
        _ORPHANED_PATH,
        "is_missing = (listed_at - missing_since).total_seconds() > INSTANCE_MISSING_SECONDS_MAX",
        "is_missing = listed_at > missing_since",
        profile="orphaned nodes",
        also=(
            (_ORPHANED_PATH, "        and not node.is_ready\n", ""),
            (_ORPHANED_PATH, "ORPHANED_SECONDS = 120.0", "ORPHANED_SECONDS = 0.0"),
            (
                _ORPHANED_PATH,
                "state.unhealthy_since.get(node.node_uid), state",
                "state.unhealthy_since.get(node.node_uid, node.created_at), state",
            ),
            (_REMOVAL_PATH, "ASKED_AGAIN_SECONDS = 60.0", "ASKED_AGAIN_SECONDS = 0.0"),
            (_REMOVAL_PATH, 'return instance is None or instance.state == "terminated"', "return True"),
            (_REMOVAL_PATH, "return is_same and not is_ready and", "return is_same and"),
        ),
    ),
    Planted(
        "an orphaned node is never removed",
        3,
        _ORPHANED_PATH,
        "        and not is_karpenter_managed(node)\n    )\n",
        "        and False\n    )\n",
        profile="orphaned nodes",
    ),
)

# 2: a gang is placed as a whole
_PLACED = (
    Planted(
        "a gang with a zone constraint is placed in several zones",
        2,
        f"{_CORE}/queueing/schedule.py",
        "    if item.within is None:\n        return free_capacity.place_gang",
        "    if True:\n        return free_capacity.place_gang",
        "busy",
        lambda policy: policy.pools[-1].sharing is not None,
    ),
)

OBSERVED = (*_RECEIVED, *_FINALIZERS, *_ORPHANED, *_PLACED)
