"""Bugs to plant in purchases: one launch per action, limits are never exceeded. See `planted.py`."""

from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_CORE = "libs/gpu_autoscaler/core"

LAUNCHES = (
    Planted(
        "the parent fence of plans is dropped",
        2,
        f"{_SCALER}/service.py",
        "expected_last_sequence=planned.parent_sequence",
        "expected_last_sequence=None",
    ),
    Planted(
        "orders in flight are forgotten",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        "    return records.order is None or records.order.refused is None\n",
        "    return False\n",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
    ),
    Planted(
        "a repeated launch uses a new token",
        2,
        f"{_SCALER}/purchases.py",
        "            action_id=decision.action_id,\n            installation",
        '            action_id=ActionId(f"{decision.action_id}-{self._now().timestamp()}"),\n            installation',
        profile="launches",
    ),
    Planted(
        "the node limit is exceeded by one",
        2,
        f"{_CORE}/limits/limits.py",
        "nodes_count + 1 > nodes_max",
        "nodes_count > nodes_max",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.limits.zones,
    ),
    Planted(
        "the GPU limit ignores the purchase itself",
        2,
        f"{_CORE}/limits/limits.py",
        "gpu_count + more > gpus_max",
        "gpu_count > gpus_max",
        profile="busy",
        where=lambda policy: policy.gpu_count_max == 24,
    ),
    Planted(
        "the hourly price limit ignores running nodes",
        2,
        f"{_CORE}/limits/limits.py",
        "if self._price_micro_usd_per_hour + price > price_max:",
        "if price > price_max:",
        profile="busy",
        where=lambda policy: policy.price_micro_usd_per_hour_max == 20_000_000,
    ),
    Planted(
        "a terminating instance does not count",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        '        return records.instance.state != "terminated"\n',
        '        return records.instance.state in ("pending", "running")\n',
        profile="busy",
        where=lambda policy: (
            policy.nodes_count_max == 12
            or policy.gpu_count_max == 24
            or policy.price_micro_usd_per_hour_max == 20_000_000
        ),
    ),
    Planted(
        "a terminating instance is treated as terminated",
        2,
        f"{_SCALER}/purchases.py",
        "        instance = None if provider_id is None else await self._provider.terminate(provider_id, now=now)\n",
        "        instance = None\n",
        profile="calm",
    ),
    Planted(
        "an instance listed after its order was closed is ignored",
        2,
        f"{_CORE}/nodes/correlation.py",
        '        is_refuted = records.instance is not None and records.instance.state != "terminated"\n',
        "        is_refuted = False\n",
        profile="delayed launches",
        where=lambda policy: policy.boot_seconds_max == 300.0,
        hours=1.0,
    ),
    Planted(
        "a node that fails to boot is never released",
        2,
        f"{_CORE}/disruption/emptiness.py",
        "    if view.phase is not NodePhase.FAILED or view.order is None or",
        "    if True or view.order is None or",
        profile="failed boots",
    ),
    Planted(
        "a node that boots too late is released with its pods",
        2,
        f"{_CORE}/disruption/emptiness.py",
        " or has_workload_pods(view, draft.pods):\n        return None\n",
        ":\n        return None\n",
        profile="losses and failed boots",
        hours=1.0,
    ),
    Planted(
        "a gang is bought partially",
        2,
        f"{_CORE}/provisioning/basket.py",
        "buyer.member_count > 1:\n            for key in bought:\n                self.free_capacity.remove",
        "buyer.member_count > 99:\n            for key in bought:\n                self.free_capacity.remove",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
        also=(
            (
                f"{_CORE}/provisioning/gangs.py",
                "        if late is None and not any(outcome.missing_count for outcome in outcomes):\n",
                "        if True:\n",
            ),
        ),
    ),
    Planted(
        "booting capacity is bought again",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        "BOOTING_PHASES = frozenset({NodePhase.PLANNED, NodePhase.ORDERED, NodePhase.LAUNCHED, ",
        "BOOTING_PHASES = frozenset({",
        profile="calm",
    ),
    Planted(
        "a refused offer is requested again at once",
        2,
        f"{_CORE}/provisioning/unavailable_offers.py",
        "if as_of < refusal.until\n",
        "if as_of < refusal.refused_at\n",
        profile="refusals",
    ),
    Planted(
        "a cordoned node counts as capacity",
        2,
        f"{_CORE}/nodes/views.py",
        "        return self.phase is NodePhase.READY\n",
        "        return self.phase in (NodePhase.READY, NodePhase.CORDONED)\n",
        profile="cordons",
    ),
)
