"""Bugs to plant in what bounds the system: money by time, what is kept free, and what people overrule for a while.

As in `planted.py`.
"""

from tests.sim.planting import Planted

from gpu_autoscaler.core.policy.policy import ScalingPolicy

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_CORE = "libs/gpu_autoscaler/core"


def _has_limit_of_money(policy: ScalingPolicy) -> bool:
    return policy.limits.spend.day_micro_usd_max is not None or policy.limits.spend.month_micro_usd_max is not None


# 5: no purchase passes a limit of money, and a job ends with its budget
_MONEY = (
    Planted(
        "a limit of the day or the month is no limit",
        5,
        f"{_CORE}/limits/spend.py",
        "        if self.spent[cap] + reserved + needed_micro_usd <= cap.micro_usd_max:\n",
        "        if True:\n",
        "busy",
        _has_limit_of_money,
    ),
    Planted(
        "a limit of the month is forgotten",
        5,
        f"{_CORE}/limits/spend.py",
        "    if money.month_micro_usd_max is not None:\n",
        "    if False:\n",
        "busy",
        lambda policy: policy.limits.spend.month_micro_usd_max is not None,
    ),
    Planted(
        "what is promised to nodes is forgotten",
        5,
        f"{_CORE}/limits/spend.py",
        "        reserved = self.promised[cap] + promised_micro_usd\n",
        "        reserved = promised_micro_usd\n",
        "busy",
        _has_limit_of_money,
    ),
    Planted(
        "purchases of one plan are not added up",
        5,
        f"{_CORE}/limits/spend.py",
        "                self._more[cap] += count * self._needed(cap, offer, customer)\n",
        "                self._more[cap] += 0\n",
        "busy",
        _has_limit_of_money,
    ),
    Planted(
        "a job's own budget is no limit",
        5,
        f"{_SCHEDULER}/job_budgets.py",
        "            if outlay.is_spent:\n",
        "            if False:\n",
        profile="busy",
    ),
)

# 2: nothing is bought twice, also not for nobody, or after a refusal
_AHEAD = (
    Planted(
        "headroom that is on its way is bought once more",
        2,
        f"{_CORE}/provisioning/forecast_step.py",
        "placed = draft.room.place_most(shape, want.target_count - shared_count) if want.doubt is None else ()",
        "placed: tuple[str, ...] = ()",
        "calm",
        lambda policy: policy.headrooms,
    ),
    Planted(
        "what was refused is asked for once more under its old token",
        2,
        f"{_SCALER}/purchases.py",
        "        if record is not None and is_settled(record):\n            return []\n        if not self._is_wanted",
        "        if record is not None and (record.launched or record.terminated):\n            return []\n"
        "        if not self._is_wanted",
        "redeliveries",
        lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
    ),
)

# 3: what people say holds while it is in force, and no longer
_PEOPLE = (
    Planted(
        "a frozen cluster buys",
        3,
        f"{_CORE}/limits/limits.py",
        "        reason = frozen or _excess_of_all(members, account, beyond)\n",
        "        reason = _excess_of_all(members, account, beyond)\n",
        "overrulers",
    ),
    Planted(
        "a drain starts under a freeze",
        3,
        f"{_CORE}/limits/limits.py",
        "    if frozen is not None:\n        removals = tuple",
        "    if False:\n        removals = tuple",
        "overrulers",
    ),
    Planted(
        "a paused pool buys",
        3,
        f"{_CORE}/limits/override_bounds.py",
        "        if (pause := self._paused.get(pool)) is not None:\n",
        "        if (pause := self._paused.get(pool)) is None and False:\n",
        "many words",
        lambda policy: len(policy.pools) == 1,
    ),
    Planted(
        "a paused pool lets its nodes go",
        3,
        f"{_CORE}/limits/override_bounds.py",
        '    if (pause := draft.directives.paused.get(view.pool or "")) is not None:\n',
        '    if (pause := draft.directives.paused.get(view.pool or "")) is None and False:\n',
        "overrulers",
        lambda policy: len(policy.pools) == 1 and policy.idle_seconds_max == 120.0,
        hours=1.0,
    ),
    Planted(
        "an override's most is passed by one",
        3,
        f"{_CORE}/limits/override_bounds.py",
        "count + more > bound.limit:",
        "count > bound.limit:",
        "overrulers",
    ),
    Planted(
        "an override never ends",
        3,
        f"{_CORE}/intake/directives.py",
        "if each.lifted is None and as_of < each.given.until)",
        "if each.lifted is None)",
        "overrulers",
    ),
    Planted(
        "what somebody took back holds all the same",
        3,
        f"{_CORE}/intake/directives.py",
        "if each.lifted is None and as_of < each.given.until)",
        "if as_of < each.given.until)",
        "overrulers",
    ),
)

# 1: who came first waits for the rest of a burst no longer than the policy says
_BURSTS = (
    Planted(
        "a burst is never over",
        1,
        f"{_CORE}/provisioning/batching.py",
        "        late_at = self._as_of - self._longest\n",
        "        late_at = self._as_of - 90 * self._longest\n",
        "busy",
        also=(
            (
                f"{_CORE}/provisioning/batching.py",
                "self._until is None or any(self._longest <= age < self._longest + self._quiet for age in ages):",
                "self._until is None:",
            ),
            (
                f"{_CORE}/provisioning/batching.py",
                "        self._until: Instant | None = None\n",
                "        self._until: Instant | None = draft.as_of + self._quiet\n",
            ),
        ),
    ),
)

# 5: what a job has spent of its own budget
_BUDGETS = (
    Planted(
        "of a job's budget only what is not charged yet counts",
        5,
        f"{_CORE}/queueing/job_budgets.py",
        "    spent = soon = 0 if known is None else known.micro_usd\n",
        "    spent = soon = 0\n",
        "busy",
    ),
)

LIMITS = (*_MONEY, *_AHEAD, *_PEOPLE, *_BURSTS, *_BUDGETS)
