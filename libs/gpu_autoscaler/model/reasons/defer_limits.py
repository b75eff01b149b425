"""Why an action is deferred: limits, spend budgets, cool-downs, directives and disruption budgets."""

from typing import Literal

from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.format import capitalized, counted, duration, instant, listed, money, price, subject_name
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.base import Reason

SpendPeriod = Literal["day", "month"]

_PERIOD_NAMES = {"day": "daily", "month": "monthly"}
_SPEND_FIELDS = {"day": "day_micro_usd_max", "month": "month_micro_usd_max"}

# ---- limits


class NodesLimit(Reason, frozen=True, kw_only=True, tag="nodes_limit"):
    """The limit of nodes is reached, counting orders in flight."""

    nodes_count: int  # nodes there and in flight
    nodes_count_max: int
    owner: str = "cluster"  # whose limit it is: cluster, pool/<name>, zone/<name> or project/<name>

    def sentence(self) -> str:
        limit = counted(self.nodes_count_max, "node")
        return (
            f"Another node would exceed the limit of {limit}{_of(self.owner)} (now: {self.nodes_count}, with orders)."
        )

    def remedy(self) -> str:
        return f"Raise nodes_count_max ({self.nodes_count_max}){_of(self.owner)}, or wait until a node is removed."


class GpusLimit(Reason, frozen=True, kw_only=True, tag="gpus_limit"):
    """The limit of GPUs is reached, counting orders in flight."""

    gpu_count: int
    gpu_count_max: int
    owner: str = "cluster"  # as for nodes

    def sentence(self) -> str:
        limit = counted(self.gpu_count_max, "GPU")
        return f"More GPUs would exceed the limit of {limit}{_of(self.owner)} (now: {self.gpu_count}, with orders)."

    def remedy(self) -> str:
        return f"Raise gpu_count_max ({self.gpu_count_max}){_of(self.owner)}, or wait until GPUs are removed."


class MinimumReached(Reason, frozen=True, kw_only=True, tag="minimum_reached"):
    """Without the node there would be fewer nodes than the policy's minimum."""

    nodes_count: int
    nodes_count_min: int

    def sentence(self) -> str:
        least = counted(self.nodes_count_min, "node")
        return f"Without the node there would be fewer than the minimum of {least} (now: {self.nodes_count})."

    def remedy(self) -> str:
        return f"Lower nodes_count_min ({self.nodes_count_min}) or the active entry of scheduled_limits."


class HourlyPriceLimit(Reason, frozen=True, kw_only=True, tag="hourly_price_limit"):
    """The purchase would exceed the limit of the fleet's price per hour."""

    price_micro_usd_per_hour: int
    price_micro_usd_per_hour_max: int  # limit of the policy

    def sentence(self) -> str:
        limit = price(self.price_micro_usd_per_hour_max)
        return f"Another {price(self.price_micro_usd_per_hour)} would exceed the fleet's price limit of {limit}."

    def remedy(self) -> str:
        limit = price(self.price_micro_usd_per_hour_max)
        return f"Raise price_micro_usd_per_hour_max ({limit}), or wait until a node is removed."


# ---- spend budgets


class SpendLimit(Reason, frozen=True, kw_only=True, tag="spend_limit"):
    """With all that is spent and reserved, the purchase could exceed a spend budget before its period ends."""

    owner: str  # whose budget it is: cluster, pool/<name>, zone/<name> or project/<name>
    period: SpendPeriod  # of the budget
    spent_micro_usd: int  # charged, and elapsed but not charged yet
    reserved_micro_usd: int  # for what runs, is ordered, or is bought by this plan
    needed_micro_usd: int  # for the purchase, until the period's end
    limit_micro_usd: int
    until: Instant  # the period's end

    def sentence(self) -> str:
        left = max(0, self.limit_micro_usd - self.spent_micro_usd - self.reserved_micro_usd)
        budget = spend_budget(self.owner, self.period, self.limit_micro_usd)
        return (
            f"The purchase may cost {money(self.needed_micro_usd)} until {instant(self.until)}, but {money(left)} of "
            f"{budget} are left ({money(self.spent_micro_usd)} spent, {money(self.reserved_micro_usd)} reserved)."
        )

    def remedy(self) -> str:
        raised = raise_spend_budget(self.owner, self.period, self.limit_micro_usd)
        return f"{raised} The next {self.period} starts at {instant(self.until)}."


class SpendEnforcementBlocked(Reason, frozen=True, kw_only=True, tag="spend_enforcement_blocked"):
    """The node will exceed a hard spend budget, and stays because its work is protected."""

    owner: str  # as for `SpendLimit`
    period: SpendPeriod  # of the budget
    left_micro_usd: int  # what is left of the limit
    limit_micro_usd: int
    until: Instant
    protection: str  # in words: "pod ml/train-0: annotation ..."

    def sentence(self) -> str:
        budget = spend_budget(self.owner, self.period, self.limit_micro_usd)
        left = f"{money(self.left_micro_usd)} left"
        return f"The node will exceed {budget} ({left}), but its work is protected: {self.protection}."

    def remedy(self) -> str:
        raised = raise_spend_budget(self.owner, self.period, self.limit_micro_usd)
        return f"{raised} To let the node be removed, remove the protection ({self.protection})."


def spend_budget(owner: str, period: SpendPeriod, limit_micro_usd: int) -> str:
    """`the daily spend budget of $10.00 of pool training`."""
    return f"the {_PERIOD_NAMES[period]} spend budget of {money(limit_micro_usd)} of {subject_name(owner)}"


def raise_spend_budget(owner: str, period: SpendPeriod, limit_micro_usd: int) -> str:
    """How to get more spend: `Raise day_micro_usd_max ($10.00) of pool training.`"""
    return f"Raise {_SPEND_FIELDS[period]} ({money(limit_micro_usd)}) of {subject_name(owner)}."


# ---- quotas

QuotaName = Literal["gpu_count_max", "month_gpu_hours_max"]


class QuotaReached(Reason, frozen=True, kw_only=True, tag="quota_reached"):
    """With the job, a user or project would use more than its quota."""

    owner: str  # whose quota it is: project/<name> or user/<name>
    quota: QuotaName  # GPUs at once, or GPU-hours a month
    used: float  # by running jobs, and by queued jobs ahead of this one; of a month also by ended jobs
    needed: float  # by the job, in the unit of the quota
    limit: float  # in the unit of the quota
    until: Instant | None = None  # of a monthly quota: the end of the month; None: of another

    def sentence(self) -> str:
        left = max(0.0, self.limit - self.used)
        unit = "GPUs at once" if self.quota == "gpu_count_max" else "GPU-hours a month"
        return (
            f"The job counts {self.needed:g} against the quota of {self.limit:g} {unit} of {_owner_name(self.owner)}, "
            f"of which {left:g} are left ({self.used:g} used)."
        )

    def remedy(self) -> str:
        wait = f"The next month starts at {instant(self.until)}." if self.until else "It waits until other jobs end."
        return f"{wait} To start it sooner, raise {self.quota} ({self.limit:g}) of {_owner_name(self.owner)} in quotas."


class CohortQuotaReached(Reason, frozen=True, kw_only=True, tag="cohort_quota_reached"):
    """The job needs more GPUs than are left of its project's nominal quota and of what the cohort lends."""

    project: str  # project of the job
    cohort: str  # empty: none
    needed_gpu_count: int  # by the job
    used_gpu_count: int  # by running jobs of the project, and by its queued jobs ahead of this one
    nominal_gpu_count: int  # quota of the project
    available_gpu_count: int  # of its own quota and what it may still borrow
    borrowing_gpu_count_max: int | None = None  # None: no limit
    borrowed_by: tuple[str, ...] = ()  # projects that use its nominal quota, the first of them

    def sentence(self) -> str:
        where = f"cohort {self.cohort}" if self.cohort else "no cohort"
        borrowers = f"; {listed(self.borrowed_by)} borrow" if self.borrowed_by else ""
        return (
            f"The job needs {counted(self.needed_gpu_count, 'GPU')}, but {self.available_gpu_count} are available to "
            f"project {self.project} in {where}: it uses {self.used_gpu_count} of its nominal quota of "
            f"{self.nominal_gpu_count}{borrowers}."
        )

    def remedy(self) -> str:
        return (
            f"It waits until jobs of project {self.project} or its cohort end. To start it sooner, raise "
            f"nominal_gpu_count ({self.nominal_gpu_count}) or the borrowing limit of the project in quotas."
        )


class PreemptedForJob(Reason, frozen=True, kw_only=True, tag="preempted_for_job"):
    """The attempt of the job was ended so that another job can start, or to move it, and its next one does not start
    yet."""

    for_job: JobId | None = None  # None: it moves
    until: Instant  # at the latest
    pods_remaining_count: int = 0  # of the job itself, which end first

    def sentence(self) -> str:
        if self.pods_remaining_count:
            left = counted(self.pods_remaining_count, "pod")
            if self.for_job is None:
                return f"The job moves; {left} of it must end first."
            return f"The job was preempted for job {self.for_job}; {left} of it must end first."
        return f"The job was preempted for job {self.for_job}, which has not started yet."

    def remedy(self) -> str:
        if self.for_job is None:
            return "It is placed again once they have ended."
        return f"It is placed again once job {self.for_job} has started, at the latest after {instant(self.until)}."


def _owner_name(owner: str) -> str:
    return "jobs without a known user" if owner == "user/" else subject_name(owner)


# ---- cool-downs, directives


class Cooldown(Reason, frozen=True, kw_only=True, tag="cooldown"):
    """Too soon after the last action of this direction."""

    remaining_seconds: float  # time until it is over

    def sentence(self) -> str:
        return f"The cool-down after the last change of this kind lasts another {duration(self.remaining_seconds)}."

    def remedy(self) -> str:
        return f"No action is needed: the action follows in {duration(self.remaining_seconds)} if it is still due."


class Frozen(Reason, frozen=True, kw_only=True, tag="frozen"):
    """The policy or a temporary freeze suspends all purchases and voluntary removals."""

    attribution: Attribution | None = None  # None: the policy

    def sentence(self) -> str:
        if self.attribution is None:
            return "The policy is frozen: nothing is bought or removed voluntarily."
        return f"Scaling was frozen {self.attribution.text()}: nothing is bought or removed voluntarily."

    def remedy(self) -> str:
        return "Set is_frozen to false in the policy." if self.attribution is None else self.attribution.remedy()


class PoolPaused(Reason, frozen=True, kw_only=True, tag="pool_paused"):
    """A pause suspends purchases and voluntary removals of the pool."""

    pool: str
    attribution: Attribution

    def sentence(self) -> str:
        return f"Pool {self.pool} was paused {self.attribution.text()}."

    def remedy(self) -> str:
        return self.attribution.remedy()


class OverrideReached(Reason, frozen=True, kw_only=True, tag="override_reached"):
    """A temporary override allows no more nodes or GPUs than there are."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_max: int

    def sentence(self) -> str:
        override = self.attribution.override("allows at most", self.count_max, self.unit, self.count)
        return f"{capitalized(override)}."

    def remedy(self) -> str:
        return self.attribution.remedy()


class KeptByOverride(Reason, frozen=True, kw_only=True, tag="kept_by_override"):
    """Without the node there would be fewer nodes or GPUs than a temporary override requires."""

    attribution: Attribution
    unit: str  # node or GPU
    count: int
    count_min: int

    def sentence(self) -> str:
        override = self.attribution.override("requires at least", self.count_min, self.unit, self.count)
        return f"{capitalized(override)}."

    def remedy(self) -> str:
        return self.attribution.remedy()


class DisruptionBudgetReached(Reason, frozen=True, kw_only=True, tag="disruption_budget_reached"):
    """As many nodes as the disruption budgets allow are being removed already."""

    disrupting_count: int  # nodes that are being removed
    disrupting_count_max: int  # nodes that may be at once

    def sentence(self) -> str:
        most = self.disrupting_count_max
        removing = f"{counted(self.disrupting_count, 'node')} {'is' if self.disrupting_count == 1 else 'are'}"
        return f"{removing} being removed already, and the disruption budgets allow {most} at a time."

    def remedy(self) -> str:
        return "Wait until a removal has finished, or raise disruption_ratio_max or removal.disruption_budgets."


class BrakeTripped(Reason, frozen=True, kw_only=True, tag="brake_tripped"):
    """The brake holds every removal by force: without it, more would have gone in an hour than the policy allows."""

    tripped_at: Instant  # when the plan that tripped it was made
    node: str  # name of the first node that it held, else its order or instance
    nodes_count: int  # removed by force within the hour before
    nodes_count_max: int
    price_micro_usd_per_hour: int | None  # of these and of the held node; None: unknown
    price_micro_usd_per_hour_max: int  # limit of the policy for one hour
    is_of_price: bool  # False: the limit of nodes tripped it

    def sentence(self) -> str:
        limit = price(self.price_micro_usd_per_hour_max)
        if not self.is_of_price:
            beyond = f"node {self.node} would have exceeded the limit of {counted(self.nodes_count_max, 'node')}"
        elif self.price_micro_usd_per_hour is None:
            beyond = f"with node {self.node}, whose price is unknown, the limit of {limit} may not be kept"
        else:
            beyond = f"with node {self.node} it would have been {price(self.price_micro_usd_per_hour)} (limit: {limit})"
        gone = f"{counted(self.nodes_count, 'node')} {'was' if self.nodes_count == 1 else 'were'}"
        return (
            f"The brake has held every removal by force since {instant(self.tripped_at)}: within an hour "
            f"{gone} removed by force, and {beyond}."
        )

    def remedy(self) -> str:
        setting = "price_micro_usd_per_hour_max" if self.is_of_price else "nodes_ratio_max"
        return (
            f"Find out why these nodes were to be removed (gpu-autoscaler why node {self.node}), then run "
            f"gpu-autoscaler resume brake; if it was intended, raise removal.brake.{setting} first."
        )


class ProvisioningRequestsLimit(Reason, frozen=True, kw_only=True, tag="provisioning_requests_limit"):
    """Older ProvisioningRequests wait for capacity, as many as are served at once."""

    open_count_max: int  # requests that are served at once

    def sentence(self) -> str:
        return f"{self.open_count_max} older ProvisioningRequests wait for capacity; more are not served at once."

    def remedy(self) -> str:
        return "Delete requests that are not needed, or limit their number by the quota of the ClusterQueue."


LimitReason = (
    BrakeTripped
    | NodesLimit
    | GpusLimit
    | HourlyPriceLimit
    | SpendLimit
    | SpendEnforcementBlocked
    | QuotaReached
    | CohortQuotaReached
    | PreemptedForJob
    | Cooldown
    | Frozen
    | PoolPaused
    | OverrideReached
    | KeptByOverride
    | DisruptionBudgetReached
    | MinimumReached
    | ProvisioningRequestsLimit
)


def _of(owner: str) -> str:
    return "" if owner == "cluster" else f" of {subject_name(owner)}"
