"""Bugs to plant in broker losses, telemetry, snapshots, partial limits and the pace of removals. See `planted.py`."""

from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_CORE = "libs/gpu_autoscaler/core"

# 7: after a loss of the broker the state is rebuilt
_LOSSES = (
    Planted(
        "accepted jobs are not republished after a loss",
        7,
        f"{_SCHEDULER}/recovery.py",
        "        missing = [row for row in rows if _is_missing(row, state)]\n",
        "        missing: list[JobRow] = []\n",
        "losses",
    ),
    Planted(
        "orders from before a loss are forgotten",
        7,
        f"{_SCALER}/recovery.py",
        "        past = open_decisions(await self._plans(newest[0].fact.plan.as_of), state, self._policy, now)\n",
        "        past = ()\n",
        "losses and policy edits",
        hours=1.0,
    ),
    Planted(
        "after a loss plans start before all lists are complete",
        7,
        f"{_SCALER}/recovery.py",
        "        if stale is not None:\n",
        "        if False:\n",
        profile="losses and policy edits",
        hours=1.0,
    ),
    Planted(
        "after a loss a node without GPUs counts as booted",
        7,
        f"{_CORE}/limits/order_recovery.py",
        "        is_usable = node.is_ready and node.allocatable.gpu_count >= buy.offer.resources.gpu_count\n",
        "        is_usable = node.is_ready or as_of >= buy.deadline_at\n",
        "losses and failed boots",
    ),
)

_QUIET_MONTHS = (
    Planted(
        "a plan whose parent was discarded is stale for ever",
        7,
        "libs/gpu_autoscaler/runtime/publisher.py",
        "    return stale.last_sequence == 0 and bool(outcome.expected_last_sequence) and is_all_known\n",
        "    return False\n",
        "quiet months",
    ),
)

_MISPRICED = """def _mispriced(made: Plan, as_of: datetime) -> Plan:
    if as_of.hour or not 5 <= as_of.minute < 20:
        return made
    change = msgspec.structs.replace
    wrong = [change(entry, offer=change(entry.offer, price_micro_usd_per_hour=1))
             if hasattr(entry, "offer") and str(entry.action_id)[0] < "8" else entry
             for entry in made.decisions]
    return change(made, decisions=tuple(wrong))

"""
# 4: what the plan check refuses stops neither drains nor other purchases
_REFUSALS = (
    Planted(
        "a plan that the plan check refuses stops every decision",
        4,
        f"{_CORE}/checked_plan.py",
        "        for violation in refused:\n            _reject(",
        "        return CheckedPlan(plan=None, violations=tuple(violations))\n"
        "        for violation in refused:\n            _reject(",
        "refused purchases",
        # And a planner that sets wrong prices in the first minutes, for some of the work.
        also=(
            (
                f"{_CORE}/checked_plan.py",
                "    made = plan(state, policy, as_of)\n    for",
                "    made = _mispriced(plan(state, policy, as_of), as_of)\n    for",
            ),
            (f"{_CORE}/checked_plan.py", "def recomputed_plan(", f"{_MISPRICED}\n\ndef recomputed_plan("),
        ),
    ),
)

# 8: a fleet with all-zero telemetry is a telemetry fault
_SENSORS = (
    Planted(
        "a fleet with all-zero telemetry is treated as idle",
        8,
        f"{_CORE}/nodes/views.py",
        "    if any(counts_for_idleness(pod) for pod in correlation.pods.get(node.name, ())):\n",
        "    sensed = state.telemetry.get(node.node_uid)\n"
        "    reads_zero = sensed is not None and not any(gpu.utilization_ratio_mean for gpu in sensed.gpus)\n"
        "    if not reads_zero and any(counts_for_idleness(pod) for pod in correlation.pods.get(node.name, ())):\n",
        "telemetry",
    ),
)

# 6: a start from a snapshot gives the state of all facts
_SNAPSHOTS = (
    Planted(
        "a snapshot records a wrong cut",
        6,
        "libs/gpu_autoscaler/runtime/snapshots.py",
        "            last_sequences=tuple((mark.stream, mark.last_sequence) for mark in marks),\n",
        "            last_sequences=tuple((mark.stream, mark.last_sequence + 3) for mark in marks),\n",
        "crashes",
    ),
)

# 2: limits of zones and projects
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

# 3: removals respect disruption budgets, use force only when due, and move work only to free capacity
_DISRUPTION = (
    Planted(
        "disruption budgets are never active",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "        elif budget.is_active(as_of):\n",
        "        elif False:\n",
        profile="operators",
        where=lambda policy: policy.removal.disruption_budgets,
    ),
    Planted(
        "disruption budgets are exceeded by one node",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "    if len(disrupting) >= disrupting_count_max:\n",
        "    if len(disrupting) > disrupting_count_max:\n",
        profile="operators",
        where=lambda policy: policy.disruption_ratio_max == 0.1,
    ),
    Planted(
        "an expired node is drained by force at once",
        3,
        f"{_CORE}/disruption/drift.py",
        "is_forced=is_overdue(view, reason, policy, draft.as_of))",
        "is_forced=True)",
        profile="operators",
        where=lambda policy: policy.removal.expire_seconds_max == 4500.0,
    ),
    Planted(
        "work is moved voluntarily before its checkpoint",
        3,
        f"{_SCALER}/eviction_order.py",
        "if _is_saving(pod, asked_at) and (is_patient or not is_hurried):",
        "if _is_saving(pod, asked_at) and not is_patient and not is_hurried:",
        profile="policy edits",
        hours=1.0,
    ),
    Planted(
        "a node is drained before its replacement is ready",
        3,
        f"{_CORE}/disruption/drift.py",
        "    if relocation.fits:\n",
        "    if True:\n",
        profile="policy edits",
        hours=1.0,
    ),
)

LATER = (*_REFUSALS, *_LOSSES, *_QUIET_MONTHS, *_SENSORS, *_SNAPSHOTS, *_PARTS, *_DISRUPTION)
