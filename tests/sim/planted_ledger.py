"""Bugs to plant in what is known of charges, and in what the store keeps. See `planted.py`."""

from msgspec.structs import replace
from tests.sim.planted_effects import SHOWN_BY_TESTS
from tests.sim.planted_tested import TESTED
from tests.sim.planting import Planted

_COSTS = "services/gpu_autoscaler_services/cost_tracker"
_BY_NAME = {bug.name: bug for bug in (*TESTED.values(), *(shown.bug for shown in SHOWN_BY_TESTS))}

# A test finds each of these as well.
_ALSO_TESTED = (
    replace(
        _BY_NAME["a hard limit is enforced on a doubtful ledger"],
        profile="ledger behind",
        where=lambda policy: policy.limits.spend.day_micro_usd_max is not None,
        hours=3.0,
    ),
    replace(_BY_NAME["a restarted cost tracker has no memory"], profile="cost tracker restarts"),
    replace(_BY_NAME["the nodes of a plan begin one after the other, each after its hooks"], profile="silent hooks"),
)

# 10: the store keeps what its retention says
_STORED = (
    Planted(
        "old spans are not merged",
        10,
        f"{_COSTS}/housekeeping.py",
        "                    self._after = await self._store.roll_up(before=before, after=self._after)\n",
        "                    self._after = None\n",
        "a month without work",
    ),
    Planted(
        "housekeeping is done once, when the process has started",
        10,
        f"{_COSTS}/housekeeping.py",
        "        if before != self._begun_for:\n",
        "        if self._begun_for is None:\n",
        "a month without work",
    ),
    Planted(
        "expired plans are not deleted",
        10,
        f"{_COSTS}/housekeeping.py",
        "plan_age=self._plan_age,\n",
        "plan_age=timedelta(days=400),\n",
        "a month without work",
    ),
)

LEDGER = (*_ALSO_TESTED, *_STORED)
