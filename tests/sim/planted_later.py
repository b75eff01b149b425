"""Bugs to plant in rules that came later: the broker lost, sensors, snapshots, limits of parts, and how nodes go.

As in `planted.py`.
"""

from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_CORE = "libs/gpu_autoscaler/core"

# 7: with everything of the broker lost, the system rebuilds
_LOSSES = (
    Planted(
        "accepted jobs are not said again after a loss",
        7,
        f"{_SCHEDULER}/recovery.py",
        "        lacking = [row for row in await self._store.unfinished_jobs() if _is_lacking(row, state)]\n",
        "        lacking: list[JobRow] = []\n",
        "losses",
    ),
    Planted(
        "what was on order before a loss is forgotten",
        7,
        f"{_SCALER}/recovery.py",
        "        past = open_decisions(await self._plans(newest[0].fact.plan.as_of), state, self._policy, now)\n",
        "        past = ()\n",
        "ruined drains",
        hours=1.0,
    ),
    Planted(
        "after a loss a plan is made before the world is listed",
        7,
        f"{_SCALER}/recovery.py",
        "        if stale is not None:\n",
        "        if False:\n",
        profile="ruined drains",
        hours=1.0,
    ),
    Planted(
        "after a loss a node without its GPUs is taken for one that came up",
        7,
        f"{_CORE}/limits/order_recovery.py",
        "        is_usable = node.is_ready and node.allocatable.gpu_count >= buy.offer.resources.gpu_count\n",
        "        is_usable = node.is_ready or as_of >= buy.deadline_at\n",
        "lost duds",
    ),
)

# 8: a fleet that reads all zero is a broken sensor
_SENSORS = (
    Planted(
        "a fleet that reads all zero is idle",
        8,
        f"{_CORE}/nodes/views.py",
        "    if any(counts_for_idleness(pod) for pod in joins.pods.get(node.name, ())):\n",
        "    sensed = state.telemetry.get(node.node_uid)\n"
        "    reads_zero = sensed is not None and not any(gpu.utilization_ratio_mean for gpu in sensed.gpus)\n"
        "    if not reads_zero and any(counts_for_idleness(pod) for pod in joins.pods.get(node.name, ())):\n",
        "sensors",
    ),
)

# 6: a start from a snapshot knows what the facts say
_SNAPSHOTS = (
    Planted(
        "a snapshot names a wrong cut",
        6,
        "libs/gpu_autoscaler/runtime/snapshots.py",
        "            last_sequences=tuple((mark.stream, mark.last_sequence) for mark in marks),\n",
        "            last_sequences=tuple((mark.stream, mark.last_sequence + 3) for mark in marks),\n",
        "crashes",
    ),
)

# 2: limits of parts
_PARTS = (
    Planted(
        "a zone's limit is not counted",
        2,
        f"{_CORE}/state/ledger.py",
        '(("pool", pool), ("zone", zone), ("project", project))',
        '(("pool", pool), ("project", project))',
        profile="busy",
        where=lambda policy: policy.limits.zones,
    ),
    Planted(
        "a project's limit is not counted",
        2,
        f"{_CORE}/state/ledger.py",
        '(("pool", pool), ("zone", zone), ("project", project))',
        '(("pool", pool), ("zone", zone))',
        profile="busy",
        where=lambda policy: policy.limits.projects,
    ),
)

# 3: nodes go at the policy's pace, with force only when they are due for it, and work where it may
_GOINGS = (
    Planted(
        "a budget of removals holds at no time",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "        elif budget.is_active(as_of):\n",
        "        elif False:\n",
        profile="operators",
        where=lambda policy: policy.removal.disruption_budgets,
    ),
    Planted(
        "one node more goes than the pace allows",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "    if len(going) >= going_count_max:\n",
        "    if len(going) > going_count_max:\n",
        profile="operators",
        where=lambda policy: policy.disruption_ratio_max == 0.1,
    ),
    Planted(
        "a node that is too old goes with force at once",
        3,
        f"{_CORE}/disruption/drift.py",
        "is_forced=is_overdue(reason, policy))",
        "is_forced=True)",
        profile="operators",
        where=lambda policy: policy.removal.expire_seconds_max == 4500.0,
    ),
    Planted(
        "work is moved by choice before it has saved",
        3,
        f"{_SCALER}/eviction_order.py",
        "if _is_saving(pod, asked_at) and (is_patient or not is_hurried):",
        "if _is_saving(pod, asked_at) and not is_patient and not is_hurried:",
        profile="editors",
        hours=1.0,
    ),
    Planted(
        "a node drains before its replacement is there",
        3,
        f"{_CORE}/disruption/drift.py",
        "    if not places.homeless and not places.coming:\n",
        "    if True:\n",
        profile="editors",
        hours=1.0,
    ),
)

LATER = (*_LOSSES, *_SENSORS, *_SNAPSHOTS, *_PARTS, *_GOINGS)
