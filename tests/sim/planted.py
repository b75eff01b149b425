"""Bugs to plant: each one small change of the code as it stands, that the simulator has to find by a broken promise.

A change names its text exactly; when the code moves on, the test beside this file says which one to plant anew. The
numbers are those of the design notes, "Promises"; what a promise does not name, settling and the second opinion hold.
"""

from tests.sim.planted_later import LATER
from tests.sim.planted_launches import LAUNCHES
from tests.sim.planted_limits import LIMITS
from tests.sim.planted_seen import SEEN
from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_COSTS = "services/gpu_autoscaler_services/cost_tracker"
_CORE = "libs/gpu_autoscaler/core"

# 1: no accepted job is lost, each ends in exactly one final state
_JOBS = (
    Planted(
        "a cancelled job's pods run on",
        1,
        f"{_SCHEDULER}/service.py",
        'if finished.outcome != "completed":',
        "if False:",
        profile="users",
    ),
    Planted(
        "an accepted request is refused when it comes again",
        1,
        f"{_SCHEDULER}/service.py",
        'if acceptance == "conflict":',
        'if acceptance != "accepted":',
        profile="users",
    ),
    Planted(
        "a job whose acceptance is tried again is lost",
        1,
        f"{_SCHEDULER}/service.py",
        "if row is not None and row.outcome is not None:\n            return ()  # a late repeat",
        "if row is not None:\n            return ()  # a late repeat",
        profile="crashes",
    ),
    Planted(
        "a released Job is left suspended",
        1,
        f"{_SCHEDULER}/binder.py",
        "if progress(job).is_suspended and not is_over(job):",
        "if False:",
        profile="calm",
    ),
    Planted(
        "a failed job is called completed",
        1,
        "libs/gpu_autoscaler/kube/translate/workload_progress.py",
        '{"Complete": "completed", "Failed": "failed"}',
        '{"Complete": "completed", "Failed": "completed"}',
        profile="calm",
    ),
    Planted(
        "acknowledged before it is published",
        1,
        "libs/gpu_autoscaler/sim/service_process.py",
        "        again_seconds = await self._attempt(recorded, key)\n",
        "        consumer.settle(sequence)\n        again_seconds = await self._attempt(recorded, key)\n",
        profile="crashes",
    ),
)

# 3: never a voluntary drain of what must not be disturbed, never a removal on missing data
_REMOVALS = (
    Planted(
        "a voluntary drain insists where a budget says no",
        3,
        f"{_SCALER}/drains.py",
        "        if not started.is_voluntary and self._clock.now() >= eviction_order",
        "        if True or self._clock.now() >= eviction_order",
        profile="editors",
        hours=1.0,
    ),
    Planted(
        "disruption budgets are ignored",
        3,
        f"{_CORE}/disruption/protection.py",
        "        if budget.namespace == pod.namespace\n",
        "        if budget.namespace == pod.name\n",
        profile="services",
        where=lambda policy: policy.is_consolidation_on and policy.consolidation_requested_ratio_max == 1.0,
        hours=2.0,
    ),
    Planted(
        "work that would start over is moved",
        3,
        f"{_CORE}/disruption/protection.py",
        'if pod.owner_kind == "Job" and not can_save(',
        'if pod.owner_kind == "Nobody" and not can_save(',
        profile="calm",
        where=lambda policy: policy.is_consolidation_on and policy.consolidation_requested_ratio_max == 1.0,
    ),
    Planted(
        "silence is taken for idle",
        3,
        f"{_CORE}/nodes/views.py",
        "    if any(counts_for_idleness(pod) for pod in joins.pods.get(node.name, ())):\n",
        "    sensed = state.telemetry.get(node.node_uid)\n"
        "    is_busy = sensed is not None and any(gpu.utilization_ratio_mean for gpu in sensed.gpus)\n"
        "    if is_busy and any(counts_for_idleness(pod) for pod in joins.pods.get(node.name, ())):\n",
        profile="sensors",
        where=lambda policy: policy.idle_seconds_max == 120.0,
    ),
    Planted(
        "nodes are removed on an old picture",
        3,
        f"{_CORE}/state/freshness.py",
        "age_seconds is not None and age_seconds <= policy.watch_age_seconds_max",
        "age_seconds is not None",
        profile="blind",
        where=lambda policy: policy.idle_seconds_max >= 300.0,
        hours=1.0,
    ),
    Planted(
        "a drain does not wait for its pods",
        3,
        f"{_SCALER}/drains.py",
        "        if not pods:\n",
        "        if True:\n",
        profile="notices",
    ),
    Planted(
        "a drain given up leaves its node cordoned",
        3,
        f"{_SCALER}/drains.py",
        "        await self._cordon(said.node_name, said.node_uid, is_cordoned=False)\n",
        "",
        profile="notices",
    ),
    Planted(
        "a node of somebody else is removed",
        3,
        f"{_CORE}/disruption/emptiness.py",
        "    return view.is_ours and view.is_usable and",
        "    return view.is_usable and",
        profile="calm",
    ),
    Planted(
        "the minimum is passed by one",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "    if staying_count <= policy.nodes_count_min:\n",
        "    if staying_count < policy.nodes_count_min:\n",
        profile="quiet",
        where=lambda policy: policy.nodes_count_min == 2 and policy.idle_seconds_max == 120.0,
    ),
)

# 4: a notice is answered
_NOTICES = (
    Planted(
        "a notice is not answered",
        4,
        f"{_CORE}/disruption/interruption.py",
        "if notice is None or view.node_uid",
        "if True or view.node_uid",
        profile="notices",
    ),
    Planted(
        "a notice is answered after its time",
        4,
        f"{_CORE}/disruption/interruption.py",
        "        return notice.notice.reclaim_at\n",
        "        return notice.notice.reclaim_at + timedelta(seconds=300.0)\n",
        profile="warnings",
        hours=2.0,
    ),
    Planted(
        "the job is not told of the notice",
        4,
        f"{_SCALER}/drains.py",
        "            await self._kube.annotate_pod(pod, deadline)\n",
        "                pass\n",
        profile="notices",
    ),
    Planted(
        "who saves its work is not left to it",
        4,
        f"{_SCALER}/eviction_order.py",
        "    return asked_at is not None and can_save(told)",
        "    return asked_at is None and can_save(told)",
        profile="notices",
    ),
    Planted(
        "a notice taken back is carried out all the same",
        4,
        f"{_CORE}/disruption/interruption.py",
        "    if notice is None or notice.withdrawn is None or",
        "    if True or notice.withdrawn is None or",
        profile="notices",
    ),
)

# 5: allocated and idle are the bill, to the micro-dollar; used is never more than allocated
_MONEY = (
    Planted(
        "the cents of a span are lost",
        5,
        f"{_CORE}/limits/accrual.py",
        "to_at - launched_at) - charged_micro_usd",
        "to_at - launched_at) - charged_micro_usd - 1",
        profile="calm",
    ),
    Planted(
        "the cents of a share are lost",
        5,
        "libs/gpu_autoscaler/model/money.py",
        "        shares[index] += 1\n",
        "        shares[index] += 0\n",
        profile="calm",
    ),
    Planted(
        "more is used than was allocated",
        5,
        f"{_CORE}/limits/accrual.py",
        "min(1.0, used_units / mean_units_held)",
        "used_units / mean_units_held",
        profile="calm",
    ),
    Planted(
        "what was charged before is charged again",
        5,
        f"{_COSTS}/service.py",
        "        charged = 0 if charge is None else charge.total_micro_usd\n",
        "        charged = 0 if charge is None else charge.last.total_micro_usd\n",
        profile="calm",
    ),
    Planted(
        "a budget is crossed and nobody is told",
        5,
        f"{_COSTS}/service.py",
        "if fact.condition() not in self._marks_told]",
        "if fact.condition() in self._marks_told]",
        profile="busy",
    ),
)

# 6: a recorded plan can be recomputed; what is said twice, or in another order, is the same state
_RECORDS = (
    Planted(
        "a plan names a wrong cut",
        6,
        f"{_SCALER}/service.py",
        "        state, cut = self._view.state, self._view.cut\n",
        "        state, last = self._view.state, dict(self._view.cut.last_sequences)\n"
        '        cut = Cut(last_sequences=tuple({**last, "POD": max(0, last.get("POD", 0) - 9)}.items()))\n',
        profile="calm",
    ),
    Planted(
        "an older word about an object overrules a newer one",
        6,
        f"{_CORE}/state/tables.py",
        "            if (known.epoch, known.version) >= (entity.epoch, entity.version):\n",
        "            if (known.epoch, known.version) == (entity.epoch, entity.version):\n",
        profile="calm",
        where=lambda policy: policy.nodes_count_min == 2,
    ),
    Planted(
        "what is gone comes back when it is said again",
        6,
        f"{_CORE}/state/tables.py",
        "            if stone.version >= version_of(entity):\n                return False\n",
        "",
        profile="messages",
    ),
    Planted(
        "a plan reads a clock of its own",
        6,
        f"{_SCALER}/service.py",
        "        made = plan(state, self._policy, now)\n",
        "        made = msgspec.structs.replace(plan(state, self._policy, now), as_of=now.replace(microsecond=0))\n",
        profile="calm",
    ),
)

PLANTED = (*_JOBS, *LAUNCHES, *_REMOVALS, *_NOTICES, *_MONEY, *_RECORDS, *LATER, *LIMITS, *SEEN)
