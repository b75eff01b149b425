"""Operators who temporarily set a hard spend limit below the cost of the running nodes.

Purchases reserve all that they may cost, so only a lowered limit can be exceeded by running nodes.
"""

from datetime import timedelta

from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.sim.cloud import Cloud
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.timeline import VirtualLoop

LOWERS_MONEY = "operator_lowers_money"
PAYS_SECONDS = (0.0, 2400.0)  # of the current fleet that the limit still covers: from none to an orderly drain
LASTS_SECONDS = (1800.0, 7200.0)


class Lowering:
    """Everybody who lowers spend limits."""

    def __init__(self, loop: VirtualLoop, cloud: Cloud, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._cloud = cloud
        self._policies = policies
        self._faults = faults
        self._count = 0

    def lower(self) -> None:
        """Set a limit that covers the running nodes for a short time only."""
        self._count += 1
        pays = timedelta(seconds=self._faults.seconds(LOWERS_MONEY, *PAYS_SECONDS))
        rest = sum(cost_micro_usd(each.price_micro_usd_per_hour, pays) for each in self._cloud.alive())
        self._policies.lower_money(self._spent_today_micro_usd() + rest)
        self._loop.call_later(self._faults.seconds(LOWERS_MONEY, *LASTS_SECONDS), self._restore, self._count)

    def _spent_today_micro_usd(self) -> int:
        now = self._loop.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return sum(
            cost_micro_usd(each.price_micro_usd_per_hour, min(each.terminated_at or now, now) - since)
            for each in self._cloud.machines
            if (since := max(each.launched_at, midnight)) < min(each.terminated_at or now, now)
        )

    def _restore(self, number: int) -> None:
        """Restore the limit, unless another was set since or the faults are over."""
        if number == self._count and not self._faults.is_over:
            self._policies.restore_money()
