"""Bugs to plant in spend limits, headroom and directives. See `planted.py`."""

from tests.sim.planting import Planted

from gpu_autoscaler.core.policy.policy import ScalingPolicy

_SCALER = "services/gpu_autoscaler_services/scaler"
_SCHEDULER = "services/gpu_autoscaler_services/scheduler"
_CORE = "libs/gpu_autoscaler/core"


def _has_spend_limit(policy: ScalingPolicy) -> bool:
    return policy.limits.spend.day_micro_usd_max is not None or policy.limits.spend.month_micro_usd_max is not None


# 5: no purchase exceeds a spend limit, and a job ends with its budget
_SPEND = (
    Planted(
        "spend limits are ignored",
        5,
        f"{_CORE}/limits/spend.py",
        "        if self.spent[cap] + reserved + needed_micro_usd <= cap.micro_usd_max:\n",
        "        if True:\n",
        "busy",
        _has_spend_limit,
    ),
    Planted(
        "monthly spend limits are ignored",
        5,
        f"{_CORE}/limits/spend.py",
        "    if spend.month_micro_usd_max is not None:\n",
        "    if False:\n",
        "busy",
        lambda policy: policy.limits.spend.month_micro_usd_max is not None,
    ),
    Planted(
        "reserved spend of nodes is ignored",
        5,
        f"{_CORE}/limits/spend.py",
        "        reserved = self.reserved[cap] + planned_micro_usd\n",
        "        reserved = planned_micro_usd\n",
        "busy",
        _has_spend_limit,
    ),
    Planted(
        "purchases of one plan do not reserve spend",
        5,
        f"{_CORE}/limits/spend.py",
        "                self._reserved[cap] += count * self._needed(cap, offer, scope)\n",
        "                self._reserved[cap] += 0\n",
        "busy",
        _has_spend_limit,
    ),
    Planted(
        "a spent job budget does not end the job",
        5,
        f"{_SCHEDULER}/job_budgets.py",
        "            if spend.is_spent:\n",
        "            if False:\n",
        profile="busy",
    ),
)

# 2: nothing is bought twice, headroom and refused orders included, and nothing for work that a limit defers
_AHEAD = (
    Planted(
        "booting headroom is bought again",
        2,
        f"{_CORE}/provisioning/forecast_step.py",
        "placed = draft.free_capacity.place_most(shape, wanted_count) if target.uncertain is None else ()",
        "placed: tuple[str, ...] = ()",
        "calm",
        lambda policy: policy.headrooms,
    ),
    Planted(
        "a refused order is retried with its old token",
        2,
        f"{_SCALER}/purchases.py",
        "        if record is not None and is_settled(record):\n            return []\n        if not self._is_wanted",
        "        if record is not None and (record.launched or record.terminated):\n            return []\n"
        "        if not self._is_wanted",
        "redeliveries",
        lambda policy: policy.nodes_count_max == 12 or policy.gpu_count_max == 24,
    ),
)

# 3: a directive is obeyed while it is active
_DIRECTIVES = (
    Planted(
        "a frozen cluster buys",
        3,
        f"{_CORE}/limits/limits.py",
        "        reason = frozen or _rejected(members, draft)",
        "        reason = _rejected(members, draft)",
        "overrides",
    ),
    Planted(
        "a drain starts under a freeze",
        3,
        f"{_CORE}/limits/limits.py",
        "    if frozen is not None:\n        removals = tuple",
        "    if False:\n        removals = tuple",
        "overrides",
    ),
    Planted(
        "a paused pool buys",
        3,
        f"{_CORE}/limits/override_bounds.py",
        "        if (pause := self._paused.get(pool)) is not None:\n",
        "        if (pause := self._paused.get(pool)) is None and False:\n",
        "many overrides",
        lambda policy: len(policy.pools) == 1,
    ),
    Planted(
        "a paused pool drains nodes",
        3,
        f"{_CORE}/limits/override_bounds.py",
        '    if (pause := draft.directives.paused.get(view.pool or "")) is not None:\n',
        '    if (pause := draft.directives.paused.get(view.pool or "")) is None and False:\n',
        "overrides",
        lambda policy: len(policy.pools) == 1 and policy.idle_seconds_max == 120.0,
        hours=1.0,
    ),
    Planted(
        "the maximum of an override is exceeded by one",
        3,
        f"{_CORE}/limits/override_bounds.py",
        "count + more > bound.limit:",
        "count > bound.limit:",
        "overrides",
    ),
    Planted(
        "an override never ends",
        3,
        f"{_CORE}/intake/directives.py",
        "if record.lifted is None and as_of < record.given.until)",
        "if record.lifted is None)",
        "overrides",
    ),
    Planted(
        "a lifted directive stays active",
        3,
        f"{_CORE}/intake/directives.py",
        "if record.lifted is None and as_of < record.given.until)",
        "if as_of < record.given.until)",
        "overrides",
    ),
)

# 1: the first of a burst waits no longer than the policy says
_BURSTS = (
    Planted(
        "a burst never ends",
        1,
        f"{_CORE}/provisioning/batching.py",
        "            if all(self._as_of < item.first_seen_at + self._longest for item in lot)\n",
        "            if all(self._as_of < item.first_seen_at + 90 * self._longest for item in lot)\n",
        "busy",
        also=(
            (
                f"{_CORE}/provisioning/batching.py",
                "self._until is None or any(at <= self._as_of < at + self._quiet for at in late_ats):",
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

# 5: spend of a job counts against its budget
_BUDGETS = (
    Planted(
        "charged cost does not count against a job budget",
        5,
        f"{_CORE}/queueing/job_budgets.py",
        "    spent = soon = 0 if known is None else known.micro_usd\n",
        "    spent = soon = 0\n",
        "busy",
    ),
)

LIMITS = (*_SPEND, *_AHEAD, *_DIRECTIVES, *_BURSTS, *_BUDGETS)
