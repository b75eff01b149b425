"""Bugs to plant: small changes of the current code that the simulator must detect by a violated invariant.

Each change quotes its text exactly; `test_planted.py` names the bugs whose text has moved. The numbers are those of
`mutants_page.PROMISES`; quiescence and the plan check cover what no promise names.
"""

from tests.sim.planted_effects import EFFECTS
from tests.sim.planted_kueue import KUEUE
from tests.sim.planted_later import LATER
from tests.sim.planted_launches import LAUNCHES
from tests.sim.planted_ledger import LEDGER
from tests.sim.planted_limits import LIMITS
from tests.sim.planted_retention import RETENTION
from tests.sim.planted_seen import OBSERVED
from tests.sim.planted_upkeep import UPKEEP
from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_COSTS = "services/gpu_autoscaler_services/cost_tracker"
_CORE = "libs/gpu_autoscaler/core"

# 1: no accepted job is lost, each ends in exactly one final state
_JOBS = (
    Planted(
        "the pods of a canceled job keep running",
        1,
        f"{_SCHEDULER}/service.py",
        'if finished.outcome != "completed":',
        "if False:",
        profile="users",
    ),
    Planted(
        "a move by our own choice uses up a retry",
        1,
        f"{_CORE}/state/retries.py",
        "    return not isinstance(reason, _FORCED_ON_US)\n",
        "    return False\n",
        "policy edits",
        lambda policy: policy.job_retries_count_max == 3,
        hours=1.0,
    ),
    Planted(
        "a repeated request of an accepted job is rejected",
        1,
        f"{_SCHEDULER}/service.py",
        'if acceptance == "conflict":',
        'if acceptance != "accepted":',
        profile="users",
    ),
    Planted(
        "a job whose acceptance is retried is lost",
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
        "a failed job is reported as completed",
        1,
        "libs/gpu_autoscaler/kube/translate/workload_progress.py",
        '{"Complete": "completed", "Failed": "failed"}',
        '{"Complete": "completed", "Failed": "completed"}',
        profile="calm",
    ),
    Planted(
        "a message is acknowledged before its outcome is published",
        1,
        "libs/gpu_autoscaler/sim/process_pool.py",
        "        again_seconds = await self._attempt(recorded, key)\n",
        "        consumer.settle(sequence)\n        again_seconds = await self._attempt(recorded, key)\n",
        profile="crashes",
    ),
)

# 3: no voluntary removal of protected work, no removal on missing data
_REMOVALS = (
    Planted(
        "a voluntary drain ignores blocked evictions",
        3,
        f"{_SCALER}/drains.py",
        "        if not started.is_voluntary and self._clock.now() >= eviction_order",
        "        if True or self._clock.now() >= eviction_order",
        profile="policy edits",
        hours=1.0,
    ),
    Planted(
        "PodDisruptionBudgets are ignored",
        3,
        f"{_CORE}/disruption/protection.py",
        "        if budget.namespace == pod.namespace\n",
        "        if budget.namespace == pod.name\n",
        profile="services",
        where=lambda policy: policy.is_consolidation_on and policy.consolidation_requested_ratio_max == 1.0,
        hours=2.0,
    ),
    Planted(
        "work that would restart from zero is moved",
        3,
        f"{_CORE}/disruption/protection.py",
        "if pod.owner_kind in OWNERS_TO_COMPLETION and not can_save(",
        'if pod.owner_kind == "Nobody" and not can_save(',
        profile="calm",
        where=lambda policy: policy.is_consolidation_on and policy.consolidation_requested_ratio_max == 1.0,
    ),
    Planted(
        "a node without telemetry is treated as idle",
        3,
        f"{_CORE}/nodes/views.py",
        "    if any(counts_for_idleness(pod) for pod in correlation.pods.get(node.name, ())):\n",
        "    sensed = state.telemetry.get(node.node_uid)\n"
        "    is_busy = sensed is not None and any(gpu.utilization_ratio_mean for gpu in sensed.gpus)\n"
        "    if is_busy and any(counts_for_idleness(pod) for pod in correlation.pods.get(node.name, ())):\n",
        profile="telemetry",
        where=lambda policy: policy.idle_seconds_max == 120.0,
    ),
    Planted(
        "nodes are removed on stale data",
        3,
        f"{_CORE}/state/freshness.py",
        "seen_at is not None and not has_lasted_longer(seen_at, policy.watch_age_seconds_max, as_of)",
        "seen_at is not None",
        profile="API outages",
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
        "a canceled drain leaves its node cordoned",
        3,
        f"{_SCALER}/drains.py",
        "        await self._cordon(drain.node_name, drain.node_uid, is_cordoned=False)\n",
        "",
        profile="notices",
    ),
    Planted(
        "an unmanaged node is removed",
        3,
        f"{_CORE}/disruption/emptiness.py",
        "    return view.is_ours and view.is_usable and",
        "    return view.is_usable and",
        profile="calm",
    ),
    Planted(
        "the minimum node count is undershot by one",
        3,
        f"{_CORE}/disruption/disruption_budgets.py",
        "    if staying_count <= policy.nodes_count_min:\n",
        "    if staying_count < policy.nodes_count_min:\n",
        profile="quiet",
        where=lambda policy: policy.nodes_count_min == 2 and policy.idle_seconds_max == 120.0,
    ),
)

# 4: interruption notices are handled
_NOTICES = (
    Planted(
        "an interruption notice does not start a drain",
        4,
        f"{_CORE}/disruption/interruption.py",
        "if notice is None or view.node_uid",
        "if True or view.node_uid",
        profile="notices",
    ),
    Planted(
        "the drain deadline is after the reclaim",
        4,
        f"{_CORE}/disruption/interruption.py",
        "        return notice.notice.reclaim_at\n",
        "        return notice.notice.reclaim_at + timedelta(seconds=300.0)\n",
        profile="warnings",
        hours=2.0,
    ),
    Planted(
        "pods are not notified of an interruption",
        4,
        f"{_SCALER}/drains.py",
        "            await self._kube.annotate_pod(pod, request)\n",
        "                pass\n",
        profile="notices",
    ),
    Planted(
        "pods that were asked to save before are not notified of an interruption",
        4,
        f"{_SCALER}/drains.py",
        "            await self._kube.annotate_pod(pod, request)\n",
        "            if labels.CHECKPOINT_REQUESTED not in pod.metadata.annotations:\n"
        "                await self._kube.annotate_pod(pod, request)\n",
        profile="notices",
        hours=2.0,
    ),
    Planted(
        "a pod that saves a checkpoint is evicted at once",
        4,
        f"{_SCALER}/eviction_order.py",
        "    return asked_at is not None and can_save(annotations)",
        "    return asked_at is None and can_save(annotations)",
        profile="notices",
    ),
    Planted(
        "a withdrawn notice does not cancel its drain",
        4,
        f"{_CORE}/disruption/interruption.py",
        "    if notice is None or notice.withdrawn is None or",
        "    if True or notice.withdrawn is None or",
        profile="notices",
    ),
)

# 5: allocated and idle cost sum to the invoice, to the micro-dollar; used cost is never more than allocated cost
_LEDGER = (
    Planted(
        "a charge span is rounded down",
        5,
        f"{_CORE}/limits/accrual.py",
        "to_at - launched_at) - charged_micro_usd",
        "to_at - launched_at) - charged_micro_usd - 1",
        profile="calm",
    ),
    Planted(
        "cost shares are rounded down",
        5,
        "libs/gpu_autoscaler/model/money.py",
        "        shares[index] += 1\n",
        "        shares[index] += 0\n",
        profile="calm",
    ),
    Planted(
        "used cost exceeds allocated cost",
        5,
        f"{_CORE}/limits/accrual.py",
        "min(1.0, used_units / mean_units_held)",
        "used_units / mean_units_held",
        profile="calm",
    ),
    Planted(
        "earlier charges are charged again",
        5,
        f"{_COSTS}/service.py",
        "        charged = 0 if charge is None else charge.total_micro_usd\n",
        "        charged = 0 if charge is None else charge.last.total_micro_usd\n",
        profile="calm",
    ),
    Planted(
        "a crossed job budget is not announced",
        5,
        f"{_COSTS}/service.py",
        "if fact.condition() not in self._marks_published]",
        "if fact.condition() in self._marks_published]",
        profile="busy",
    ),
)

# 6: a recorded plan can be recomputed; repeated or reordered facts give the same state
_RECORDS = (
    Planted(
        "what a plan defers is named object by object",
        6,
        f"{_SCALER}/service.py",
        "        made = self._plan_made(await self.compute(grouped, planned, state), cut)\n",
        "        made = self._plan_made(planned, cut)\n",
        "calm",
    ),
    Planted(
        "a group of deferred objects replaces an earlier one of the same reason",
        6,
        f"{_CORE}/deferred_groups.py",
        "        keyed.setdefault(key_of(entries[0].deferred, entries[0].traits.shape), []).extend(entries)\n",
        "        keyed[key_of(entries[0].deferred, entries[0].traits.shape)] = entries\n",
        "busy",
    ),
    Planted(
        "a plan records a wrong cut",
        6,
        f"{_SCALER}/service.py",
        "        state, cut = self._view.state, self._view.cut\n",
        "        state, last = self._view.state, dict(self._view.cut.last_sequences)\n"
        '        cut = Cut(last_sequences=tuple({**last, "POD": max(0, last.get("POD", 0) - 9)}.items()))\n',
        profile="calm",
    ),
    Planted(
        "an older fact about an object replaces a newer one",
        6,
        f"{_CORE}/state/tables.py",
        "            if (known.epoch, known.version) >= (entity.epoch, entity.version):\n",
        "            if (known.epoch, known.version) == (entity.epoch, entity.version):\n",
        profile="calm",
        where=lambda policy: policy.nodes_count_min == 2,
    ),
    Planted(
        "a repeated fact restores a removed object",
        6,
        f"{_CORE}/state/tables.py",
        "            if tombstone.version >= version_of(entity):\n                return False\n",
        "",
        profile="messages",
    ),
    Planted(
        "a plan uses another time than recorded",
        6,
        f"{_SCALER}/service.py",
        "        planned = self._accepted(await self.compute(checked_plan, state, self._policy, as_of), now)\n",
        "        planned = self._accepted(await self.compute(checked_plan, state, self._policy, as_of), now)\n"
        "        planned = msgspec.structs.replace(planned, as_of=now.replace(microsecond=0))\n",
        profile="calm",
    ),
)

PLANTED = (
    *_JOBS, *LAUNCHES, *_REMOVALS, *_NOTICES, *_LEDGER, *_RECORDS, *LATER, *LIMITS, *OBSERVED, *RETENTION, *EFFECTS,
    *LEDGER, *UPKEEP, *KUEUE,
)  # fmt: skip
