"""Bugs to plant in what is seen of the world and held in it: notices and their queue, finalizers, places, bursts.

As in `planted.py`.
"""

from tests.sim.planting import Planted

_SPOT = "services/gpu_autoscaler_services/spot_watcher"
_CORE = "libs/gpu_autoscaler/core"

# 4: what is not read is not answered
_HEARD = (
    Planted(
        "notices of spot machines are never read",
        4,
        f"{_SPOT}/polls.py",
        "node.capacity_type in (CapacityType.SPOT, None)",
        "node.capacity_type is None",
        profile="notices",
    ),
    Planted(
        "an event of the cloud's queue is deleted before it is on record",
        4,
        f"{_SPOT}/events.py",
        "        facts: list[Fact] = [fact for found in news for fact in found]\n        if not facts:\n",
        "        facts: list[Fact] = [fact for found in news for fact in found]\n        if True:\n",
        profile="queue",
    ),
    Planted(
        "an event of the cloud's queue is told of nobody",
        4,
        f"{_SPOT}/events.py",
        "        if provider_id.endswith(ending):\n",
        "        if False:\n",
        profile="queue",
        also=((f"{_SPOT}/events.py", "node.provider_id.endswith(ending):", "False:"),),
    ),
)

# 3: who deletes a node by hand does not throw out what runs there
_HELD = (
    Planted(
        "a node that was deleted by hand is let go at once",
        3,
        f"{_CORE}/disruption/deleted_nodes.py",
        "is_wanted = view.node.is_guarded and is_wanted and not _has_ended(view, state)",
        "is_wanted = False",
        profile="deleters",
    ),
)

_LEFT = f"{_CORE}/disruption/orphaned_nodes.py"
_REMOVES = "services/gpu_autoscaler_services/scaler/orphaned_nodes.py"

# 3: nodes whose instance is gone are removed, and no others
_LEFT_OVER = (
    Planted(
        "a node is removed after one list that lacks its instance",
        3,
        _LEFT,
        "is_missing = (listed_at - missing_since).total_seconds() > INSTANCE_MISSING_SECONDS_MAX",
        "is_missing = listed_at > missing_since",
        profile="left nodes",
        also=(
            (_LEFT, "        and not node.is_ready\n", ""),
            (_LEFT, "LEFT_SECONDS = 120.0", "LEFT_SECONDS = 0.0"),
            (
                _LEFT,
                "state.unhealthy_since.get(node.node_uid), state",
                "state.unhealthy_since.get(node.node_uid, node.created_at), state",
            ),
            (_REMOVES, "ASKED_AGAIN_SECONDS = 60.0", "ASKED_AGAIN_SECONDS = 0.0"),
            (_REMOVES, 'return instance is None or instance.state == "terminated"', "return True"),
            (_REMOVES, "return is_same and not is_ready and", "return is_same and"),
        ),
    ),
    Planted(
        "a node whose instance is gone stays for ever",
        3,
        _LEFT,
        "    if not silent or frozen_by(",
        "    if True or frozen_by(",
        profile="left nodes",
    ),
)

# 2: a gang is whole, also in its place
_PLACED = (
    Planted(
        "a gang that belongs together is placed apart",
        2,
        f"{_CORE}/queueing/schedule.py",
        "    if item.within is None:\n        return room.place_gang",
        "    if True:\n        return room.place_gang",
        "busy",
        lambda policy: policy.pools[-1].sharing is not None,
    ),
)

SEEN = (*_HEARD, *_HELD, *_LEFT_OVER, *_PLACED)
