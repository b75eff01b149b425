"""Bugs to plant in purchases: never two launches for one action, never more than the limits. As in `planted.py`."""

from tests.sim.planting import Planted

_SCALER = "services/gpu_autoscaler_services/scaler"
_CORE = "libs/gpu_autoscaler/core"

LAUNCHES = (
    Planted(
        "the fence is dropped",
        2,
        f"{_SCALER}/service.py",
        "expected_last_sequence=made.parent_sequence",
        "expected_last_sequence=None",
    ),
    Planted(
        "orders in flight are forgotten",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        "    return joined.order is None or joined.order.refused is None\n",
        "    return False\n",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
    ),
    Planted(
        "launched again without the token",
        2,
        f"{_SCALER}/purchases.py",
        "            action_id=decision.action_id,\n            installation",
        '            action_id=ActionId(f"{decision.action_id}-{self._now().timestamp()}"),\n            installation',
        profile="launches",
    ),
    Planted(
        "one node too many",
        2,
        f"{_CORE}/limits/limits.py",
        "self._nodes[owner] + 1 > nodes_max",
        "self._nodes[owner] > nodes_max",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.limits.zones,
    ),
    Planted(
        "GPUs of the purchase are not counted",
        2,
        f"{_CORE}/limits/limits.py",
        "self._gpus[owner] + more > gpus_max",
        "self._gpus[owner] > gpus_max",
        profile="busy",
        where=lambda policy: policy.gpu_count_max == 24,
    ),
    Planted(
        "money is no limit",
        2,
        f"{_CORE}/limits/limits.py",
        "if self._price_micro_usd_per_hour + price > price_max:",
        "if price > price_max:",
        profile="busy",
        where=lambda policy: policy.price_micro_usd_per_hour_max == 20_000_000,
    ),
    Planted(
        "an instance that ends counts no more",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        '        return joined.instance.state != "terminated"\n',
        '        return joined.instance.state in ("pending", "running")\n',
        profile="busy",
        where=lambda policy: (
            policy.nodes_count_max == 12
            or policy.gpu_count_max == 24
            or policy.price_micro_usd_per_hour_max == 20_000_000
        ),
    ),
    Planted(
        "an instance that ends is taken for ended",
        2,
        f"{_SCALER}/purchases.py",
        "        instance = None if provider_id is None else await self._provider.terminate(provider_id, now=now)\n",
        "        instance = None\n",
        profile="calm",
    ),
    Planted(
        "an instance shown after its order was closed is forgotten",
        2,
        f"{_CORE}/nodes/correlation.py",
        '        is_refuted = joined.instance is not None and joined.instance.state != "terminated"\n',
        "        is_refuted = False\n",
        profile="late launches",
        where=lambda policy: policy.boot_seconds_max == 300.0,
        hours=1.0,
    ),
    Planted(
        "what never came up is never given back",
        2,
        f"{_CORE}/disruption/emptiness.py",
        "    if view.phase is not NodePhase.FAILED or view.order is None or",
        "    if True or view.order is None or",
        profile="duds",
    ),
    Planted(
        "a node that came too late is ended under its pods",
        2,
        f"{_CORE}/disruption/emptiness.py",
        " or has_workload_pods(view, draft.pods):\n        return None\n",
        ":\n        return None\n",
        profile="lost duds",
        hours=1.0,
    ),
    Planted(
        "a gang is bought in part",
        2,
        f"{_CORE}/provisioning/basket.py",
        "buyer.member_count > 1:\n            for key in bought:\n                self._take",
        "buyer.member_count > 99:\n            for key in bought:\n                self._take",
        profile="busy",
        where=lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
        also=(
            (
                f"{_CORE}/provisioning/scale_up.py",
                "        if gang is not None and (reasons or any(",
                "        if gang is not None and False and (reasons or any(",
            ),
        ),
    ),
    Planted(
        "what is on its way is bought once more",
        2,
        f"{_CORE}/nodes/lifecycle.py",
        "BOOTING_PHASES = frozenset({NodePhase.PLANNED, NodePhase.ORDERED, NodePhase.LAUNCHED, ",
        "BOOTING_PHASES = frozenset({",
        profile="calm",
    ),
    Planted(
        "what was refused is asked for again at once",
        2,
        f"{_CORE}/provisioning/unavailable_offers.py",
        "if as_of < refusal.until\n",
        "if as_of < refusal.refused_at\n",
        profile="refusals",
    ),
    Planted(
        "a cordoned node counts as room",
        2,
        f"{_CORE}/nodes/views.py",
        "        return self.phase is NodePhase.READY\n",
        "        return self.phase in (NodePhase.READY, NodePhase.CORDONED)\n",
        profile="cordons",
    ),
)
