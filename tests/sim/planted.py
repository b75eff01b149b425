"""Bugs to plant: each one small change of the code as it stands, that the simulator has to find by a broken promise.

A change names its text exactly; when the code moves on, the test beside this file says which one to plant anew.
"""

import msgspec


class Planted(msgspec.Struct, frozen=True):
    """One bug: in this file, this text becomes that."""

    name: str
    path: str  # from the repository's root
    right: str
    wrong: str


_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_CORE = "libs/gpu_autoscaler/core"

PLANTED = (
    Planted("the fence is dropped", f"{_SCALER}/service.py", "expected_last_sequence=made.parent_sequence", ""),
    Planted(
        "orders in flight are forgotten",
        f"{_CORE}/life.py",
        "    return joined.order is None or joined.order.refused is None\n",
        "    return False\n",
    ),
    Planted(
        "launched again without the token",
        f"{_SCALER}/purchases.py",
        "            action_id=ordered.action_id,\n            installation",
        '            action_id=ActionId(f"{ordered.action_id}-{self._now().timestamp()}"),\n            installation',
    ),
    Planted(
        "a cordoned node counts as room",
        f"{_CORE}/life.py",
        "        return self.phase is NodePhase.READY\n",
        "        return self.phase in (NodePhase.READY, NodePhase.CORDONED)\n",
    ),
    Planted(
        "a voluntary drain insists where a budget says no",
        f"{_SCALER}/drains.py",
        "        if not started.is_voluntary and self._clock.now() >= eviction_order",
        "        if True or self._clock.now() >= eviction_order",
    ),
    Planted(
        "work that would start over is moved",
        f"{_CORE}/protection.py",
        'if pod.owner_kind == "Job":',
        'if pod.owner_kind == "Nobody":',
    ),
    Planted(
        "one node too many",
        f"{_CORE}/limits.py",
        "self._nodes[owner] + 1 > nodes_max",
        "self._nodes[owner] > nodes_max",
    ),
    Planted(
        "GPUs of the purchase are not counted",
        f"{_CORE}/limits.py",
        "self._gpus[owner] + more > gpus_max",
        "self._gpus[owner] > gpus_max",
    ),
    Planted(
        "the cents of a span are lost",
        f"{_CORE}/accrual.py",
        "to_at - launched_at) - charged_micro_usd",
        "to_at - launched_at) - charged_micro_usd - 1",
    ),
    Planted(
        "a notice is not answered", f"{_CORE}/spot.py", "if notice is None or view.node_uid", "if True or view.node_uid"
    ),
    Planted(
        "a cancelled job's pods run on",
        f"{_SCHEDULER}/service.py",
        'if finished.outcome != "completed":',
        "if False:",
    ),
    Planted(
        "an accepted request is refused when it comes again",
        f"{_SCHEDULER}/service.py",
        'if acceptance == "conflict":',
        'if acceptance != "accepted":',
    ),
    Planted(
        "a drain does not wait for its pods", f"{_SCALER}/drains.py", "        if not pods:\n", "        if True:\n"
    ),
    Planted(
        "what never came up is never given back",
        f"{_CORE}/scale_down.py",
        "    if view.phase is not NodePhase.FAILED or order is None:\n",
        "    if True or order is None:\n",
    ),
    Planted(
        "a drain given up leaves its node cordoned",
        f"{_SCALER}/drains.py",
        "        await self._cordon(said.node_name, said.node_uid, is_cordoned=False)\n",
        "",
    ),
    Planted(
        "an instance that ends is taken for ended",
        f"{_SCALER}/purchases.py",
        "        instance = None if provider_id is None else await self._provider.terminate(provider_id, now=now)\n",
        "        instance = None\n",
    ),
    Planted(
        "a released Job is left suspended",
        f"{_SCHEDULER}/binder.py",
        "if job.spec.suspend and not is_over(job):",
        "if False:",
    ),
)
