"""Bugs to plant in acts of upkeep: decided too early, again, for the wrong object, or carried out without a decision.

See `planted.py`.
"""

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_DISRUPTION = f"{_CORE}/disruption"
_STEPS = "services/gpu_autoscaler_services/scaler/upkeep.py"

# 3: only what the plan names is touched, for its cause, and not again and again
UPKEEP = (
    Planted(
        "an orphaned node is removed before others had time to",
        3,
        f"{_DISRUPTION}/orphaned_nodes.py",
        "ORPHANED_SECONDS = 120.0",
        "ORPHANED_SECONDS = 0.0",
        profile="orphaned nodes",
    ),
    Planted(
        "a finalizer is removed that no plan names",
        3,
        _STEPS,
        "                await self._finalizers.write(decision)\n",
        "                await self._finalizers.write(decision)\n"
        "                await self._finalizers.write(\n"
        "                    RemoveFinalizer(\n"
        "                        action_id=decision.action_id, retry_at=decision.retry_at,\n"
        "                        node_uid=decision.node_uid, node_name=decision.node_name, reason=decision.reason,\n"
        "                    )\n"
        "                )\n",
        profile="busy",
    ),
    Planted(
        "checkpoints are requested on nodes that Karpenter does not delete",
        3,
        f"{_DISRUPTION}/deleted_nodes.py",
        " and node.action_id is not None and is_karpenter_managed(node)",
        " and node.action_id is not None",
        profile="deleted nodes",
    ),
    Planted(
        "running jobs are never asked to save",
        3,
        f"{_DISRUPTION}/periodic_checkpoints.py",
        "    if not rules.is_on:\n        return ()\n",
        "    if rules.is_on:\n        return ()\n",
        profile="busy",
    ),
    Planted(
        "a job is asked to save as soon as it has saved",
        3,
        f"{_DISRUPTION}/periodic_checkpoints.py",
        "    if not has_lasted(since, reason.interval_seconds, as_of):\n        return None\n",
        "    has_lasted(since, reason.interval_seconds, as_of)\n",
        profile="busy",
    ),
    Planted(
        "a busy job is canceled as idle",
        3,
        f"{_DISRUPTION}/idle_jobs.py",
        "            since = since_at_most(gpu.utilization, busy_ratio_max * 100)\n",
        "            since = since_at_most(gpu.utilization, 100)\n",
        profile="busy",
    ),
    Planted(
        "the end of a reservation is announced for instances without one",
        3,
        f"{_DISRUPTION}/interruption.py",
        "order.decision is None else order.decision.offer.paid_until\n",
        "order.decision is None else order.decision.deadline_at\n",
        profile="busy",
    ),
    Planted(
        "an act is decided again in each plan",
        3,
        f"{_CORE}/state/upkeep_attempts.py",
        "    if known is not None and as_of < known.retry_at:\n        return None\n",
        "",
        profile="API outages",
    ),
    Planted(
        "no finalizer is added",
        3,
        f"{_CORE}/upkeep.py",
        "        if change.is_wanted is is_wanted and ",
        "        if change.is_wanted is is_wanted is False and ",
        profile="busy",
        where=lambda policy: policy.nodes_count_min > 0,  # a node is left at the end
    ),
)
