"""Reasons and decisions in sentences: what a person reads where a machine reads the struct.

A reason without a sentence is an error of the type checker. Used through `core/explain.py`.
"""

from typing import assert_never

from gpu_autoscaler.core.words.waiting import Waiting, why_waiting
from gpu_autoscaler.core.words.wording import counted, instant, money, named, percent, price, span, thing, told
from gpu_autoscaler.model import reasons, shape_reasons, use_reasons
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, Deferred, ReleaseInstance
from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.hints import RebalanceRecommended
from gpu_autoscaler.model.passed import DroppedPreference, RejectionCause, RejectedOffer

ActionReason = reasons.BuyReason | reasons.DrainReason | reasons.ReleaseReason | reasons.KeepReason
AnyReason = ActionReason | reasons.DeferReason


def sentence(reason: AnyReason) -> str:
    """Return the reason as one sentence."""
    return _why_done(reason) if isinstance(reason, ActionReason) else _why_held(reason)


def decision_sentence(decision: AnyDecision) -> str:
    """Return what was decided, and why."""
    match decision:
        case BuyNode():
            offer = decision.offer
            what = f"{offer.instance_type} in {offer.zone} as {offer.capacity_type}"
            cost = price(offer.price_micro_usd_per_hour)
            gang = f", together with the rest of {thing(decision.gang)}" if decision.gang else ""
            done = f"Buy {what} for pool {decision.pool} at {cost}{gang}."
        case DrainNode():
            how = "by choice" if decision.is_voluntary else "without a choice"
            done = f"Drain node {decision.node_name} {how}, until {instant(decision.deadline_at)} at the latest."
        case CancelDrain():
            done = f"Keep node {decision.node_name} after all."
        case ReleaseInstance():
            done = f"Give back {decision.provider_id or 'what was ordered'} (order {decision.order_action_id})."
        case _:
            assert_never(decision)
    return f"{done} {sentence(decision.reason)}"


def held_back_sentence(held: Deferred) -> str:
    """Return what was not done, in which step, and why."""
    return f"Held back for {thing(held.subject)} (step {held.step}): {sentence(held.reason)}"


def _why_done(reason: ActionReason) -> str:
    match reason:
        case reasons.UnmetDemand():
            waiting = named([thing(key) for key in reason.demand]) or "Work"
            return (
                f"{_capital(waiting)} cannot run on anything that runs, boots or is ordered; of "
                f"{counted(reason.offers_considered, 'offer')} considered this was the choice, at "
                f"{price(reason.price_micro_usd_per_hour)}.{_passed_over(reason.instead_of)}"
                f"{_dropped(reason.dropped)}"
            )
        case reasons.ReplacesAtRiskNode():
            when = "soon" if reason.reclaim_at is None else f"at {instant(reason.reclaim_at)}"
            why = f"Node {reason.node_name} will be gone {when}, and its work needs another place."
            return why + _passed_over(reason.instead_of) + _dropped(reason.dropped)
        case reasons.ReplacesNodes():
            nodes = counted(len(reason.node_names), "node")
            return (
                f"{nodes} ({named(reason.node_names)}) will go ({reason.cause}), "
                f"and {counted(len(reason.demand), 'pod')} there will need another place."
            )
        case reasons.BelowMinimum():
            least = counted(reason.nodes_count_min, "node")
            return f"The policy wants at least {least} (now: {reason.nodes_count})."
        case reasons.BelowOverride():
            least = counted(reason.count_min, reason.unit)
            return f"At least {least} {_of(reason.attribution)} are wanted (now: {reason.count}), {told(reason.attribution)}."
        case reasons.CapacityBuffer():
            wanted = counted(reason.wanted_gpu_count, "GPU")
            for_whom = named([thing(key) for key in reason.demand])
            return f"{wanted} are to be free for {for_whom} (free or on their way: {reason.free_gpu_count})."
        case use_reasons.UtilizationHigh():
            used, most = percent(reason.utilization_ratio), percent(reason.utilization_ratio_max)
            return f"GPUs are used at {used}, above {most}, and the policy wants a node for that alone."
        case reasons.DemandReturned():
            return f"{_capital(named([thing(key) for key in reason.demand]))} can run here, which beats buying anew."
        case reasons.NoticeWithdrawn():
            return "The cloud took its notice back."
        case (
            reasons.NodeIdle()
            | reasons.NodeUnderused()
            | reasons.NodeExpired()
            | reasons.NodeDrifted()
            | RebalanceRecommended()
            | reasons.NodeUnhealthy()
            | reasons.SpotReclaim()
            | reasons.NodeDeleted()
            | reasons.AboveOverride()
        ):
            return _why_drained(reason)
        case _:
            return _why_released(reason)


_BECAUSE = {
    RejectionCause.UNAVAILABLE: "the cloud had none lately",
    RejectionCause.SPOT_NOT_ALLOWED: "this work must not be on spot",
    RejectionCause.LIMIT: "it would pass a limit",
    RejectionCause.RESERVED_FIRST: "what is reserved is paid already",
    RejectionCause.POOL_PRIORITY: "its pool comes later",
    RejectionCause.INTERRUPTION_RATE: "too many nodes are taken there",
    RejectionCause.STORM_SHARE: "one storm there would take too much of the work",
    RejectionCause.EXPECTED_COST: "it would cost more with its boot and what interruptions undo",
    RejectionCause.FLEET_COST: "for all that is bought together this is cheaper",
}


def _passed_over(passed: RejectedOffer | None) -> str:
    if passed is None:
        return ""
    return f" {passed.offer} at {price(passed.price_micro_usd_per_hour)} was not taken: {_BECAUSE[passed.because]}."


def _dropped(dropped: tuple[DroppedPreference, ...]) -> str:
    said = (
        f" Preferred but not kept: {each.preference} "
        + (
            "(nothing for sale has it)."
            if each.kept_by is None
            else f"({each.kept_by} at {price(each.price_micro_usd_per_hour)} has it)."
        )
        for each in dropped
    )
    return "".join(said)


def _boot_missing(reason: reasons.BootTimedOut) -> str:
    """What never came, and where to look."""
    match reason.missing_step:
        case "node":
            return " No node registered: look at the instance's console, its user data and its way to the API server."
        case "kubelet":
            return " Its node registered and never was ready: look at its conditions and its network agent."
        case "gpus":
            return (
                f" Its node is ready with {reason.detail}: driver or device plugin missing, look at their pods there."
            )
        case "startup_taint":
            return f" Start-up taint {reason.detail} was never taken away: look at what is to make the node ready."
        case "unknown":
            return ""


def _why_released(reason: reasons.ReleaseReason) -> str:
    match reason:
        case reasons.BootTimedOut():
            limit = span(reason.boot_seconds_max)
            late = f"It was not usable {span(reason.booting_seconds)} after it was ordered; {limit} are allowed."
            return late + _boot_missing(reason)
        case reasons.NodeLost():
            return "Its node was deleted from Kubernetes, so that no work can reach it."
        case reasons.NodeOrphaned():
            return f"No decision of ours stands behind the instance; it was seen for {span(reason.seen_seconds)}."
        case reasons.GangAbandoned():
            why = reason.defer_reason.replace("_", " ")
            return f"It was bought for {thing(reason.gang)}, the rest of which cannot be had now ({why})."
        case reasons.SpendExhausted():
            most = f"{money(reason.limit_micro_usd)} that {thing(reason.owner)} may spend in the {reason.period}"
            return f"It goes before the {most} are passed ({money(reason.spent_micro_usd)} are spent)."
        case _:
            assert_never(reason)


_DrainedReason = (
    reasons.NodeIdle
    | reasons.NodeUnderused
    | reasons.NodeExpired
    | reasons.NodeDrifted
    | RebalanceRecommended
    | reasons.NodeUnhealthy
    | reasons.SpotReclaim
    | reasons.NodeDeleted
    | reasons.AboveOverride
)


def _why_drained(reason: _DrainedReason) -> str:
    match reason:
        case reasons.NodeIdle():
            return f"No pod has used it for {span(reason.idle_seconds)}; {span(reason.idle_seconds_max)} are allowed."
        case reasons.NodeUnderused():
            saving = reason.saving_micro_usd_per_hour
            saved = "whose saving nobody knows" if saving is None else f"which saves {price(saving)}"
            ratio = reason.utilization_ratio
            used = "" if ratio is None else f"Its GPUs are used at {percent(ratio)} for a while. "
            return f"{used}Its {counted(len(reason.pods), 'pod')} may be moved and fit elsewhere, {saved}."
        case reasons.NodeExpired():
            return f"It is {span(reason.age_seconds)} old; nodes go at {span(reason.age_seconds_max)}."
        case RebalanceRecommended():
            said = instant(reason.noticed_at)
            return f"The cloud said at {said} that it is likelier to take it, and its work has room elsewhere."
        case reasons.NodeDrifted():
            return f"The policy would not buy it like that today: {reason.difference}."
        case reasons.NodeUnhealthy():
            limit = span(reason.unhealthy_seconds_max)
            return f"It is sick: {reason.evidence} for {span(reason.unhealthy_seconds)}; {limit} are allowed."
        case reasons.SpotReclaim():
            when = "soon" if reason.reclaim_at is None else f"at {instant(reason.reclaim_at)}"
            return f"The cloud takes the instance back {when} ({reason.kind})."
        case reasons.NodeDeleted():
            return f"Somebody deleted the node by hand at {instant(reason.deleted_at)}; its instance goes with it."
        case reasons.AboveOverride():
            limit = counted(reason.count_max, reason.unit)
            return f"At most {limit} {_of(reason.attribution)} are wanted (now: {reason.count}), {told(reason.attribution)}."
        case _:
            assert_never(reason)


def _why_held(reason: reasons.DeferReason) -> str:
    if isinstance(reason, Waiting):
        return why_waiting(reason)
    match reason:
        case reasons.PodConstraintsViolated():
            rules = named(reason.rules)
            return f"Nodes could be had, but none where its pods may stand beside those that are there ({rules})."
        case reasons.NoOfferFits():
            return f"Nothing on sale can hold it: {reason.detail}."
        case reasons.OffersUnavailable():
            offers = named(reason.offers)
            return f"The cloud had no capacity for {offers}; it is asked again after {instant(reason.retry_at)}."
        case reasons.PriceUnknown():
            return f"The price of {named(reason.offers)} is unknown, and no price is not free."
        case reasons.NodesLimit():
            return _limit(reason.owner, reason.nodes_count, reason.nodes_count_max, "node")
        case reasons.GpusLimit():
            return _limit(reason.owner, reason.gpu_count, reason.gpu_count_max, "GPU")
        case reasons.HourlyPriceLimit() | reasons.SpendLimit() | reasons.SpendEnforcementBlocked():
            return _why_not_paid(reason)
        case reasons.Cooldown():
            return f"It is too soon after the last change; {span(reason.remaining_seconds)} remain."
        case reasons.Frozen() | reasons.PoolPaused() | reasons.OverrideReached() | reasons.KeptByOverride():
            return _why_overruled(reason)
        case (
            reasons.KeptAsBuffer()
            | reasons.ForecastUncertain()
            | use_reasons.TelemetryUnreliable()
            | use_reasons.UtilizationUnconfirmed()
        ):
            return _why_not_ahead(reason)
        case _:
            return _why_not_whole(reason) if isinstance(reason, _NotWhole) else _why_kept(reason)


_KeptReason = (
    reasons.NotYetIdle
    | reasons.PodProtected
    | reasons.NodeProtected
    | reasons.PodsFitNowhere
    | reasons.WatchStale
    | reasons.DisruptionBudgetReached
    | reasons.MinimumReached
    | reasons.SavingTooSmall
    | reasons.TooManyUnhealthy
)


_NotWhole = (
    shape_reasons.NoDomainFits
    | shape_reasons.VolumeNotReady
    | shape_reasons.DeviceClaimsUnsupported
    | shape_reasons.GroupIncomplete
)


def _why_not_whole(reason: _NotWhole) -> str:
    match reason:
        case shape_reasons.NoDomainFits():
            tried, members = counted(reason.domains_count, "value"), counted(reason.members_count, "member")
            return f"Its {members} must share a value of {reason.topology_key}; of {tried} none can have them all."
        case shape_reasons.VolumeNotReady():
            return f"No node would help: {reason.detail}."
        case shape_reasons.DeviceClaimsUnsupported():
            return f"What it claims of devices cannot be bought for: {reason.detail}."
        case shape_reasons.GroupIncomplete():
            there = f"{reason.members_present} of {counted(reason.members_count_min, 'pod')}"
            return f"Only {there} that {thing(reason.group)} needs are there; it starts whole or not at all."


def _why_kept(reason: _KeptReason) -> str:
    match reason:
        case reasons.NotYetIdle():
            return f"It has been empty for {span(reason.idle_seconds)} of {span(reason.idle_seconds_max)}."
        case reasons.PodProtected():
            return f"Pod {reason.pod} must not be disturbed: {reason.protection}."
        case reasons.NodeProtected():
            return f"The node must stay: {reason.protection}."
        case reasons.PodsFitNowhere():
            return f"{_capital(counted(len(reason.pods), 'pod'))} here would have no other place."
        case reasons.WatchStale():
            limit = span(reason.age_seconds_max)
            if reason.age_seconds is None:
                return f"The list of {reason.source} was never read; nothing is decided in the dark."
            return f"The last word about {reason.source} is {span(reason.age_seconds)} old; {limit} are allowed."
        case reasons.DisruptionBudgetReached():
            leaving = counted(reason.disrupting_count, "node")
            return f"Already on the way out: {leaving}; at most {reason.disrupting_count_max} may be at a time."
        case reasons.MinimumReached():
            least = counted(reason.nodes_count_min, "node")
            return f"The policy wants at least {least} (now: {reason.nodes_count})."
        case reasons.TooManyUnhealthy():
            sick = f"{reason.unhealthy_count} of {counted(reason.nodes_count, 'node')}"
            return f"{sick} look sick, above {percent(reason.unhealthy_ratio_max)}: none is touched until somebody looked."
        case reasons.SavingTooSmall():
            least = percent(reason.saving_ratio_min)
            return f"Moving its pods would save {percent(reason.saving_ratio)} of its price; {least} are asked for."
        case _:
            assert_never(reason)


_FAULTS: dict[use_reasons.TelemetryFault, str] = {
    "silent": "say nothing",
    "frozen": "show one page again and again",
    "corrupt": "show figures that cannot be",
    "all_zero": "read zero although pods hold their GPUs",
}


def _why_use_says_nothing(reason: use_reasons.TelemetryUnreliable | use_reasons.UtilizationUnconfirmed) -> str:
    if isinstance(reason, use_reasons.UtilizationUnconfirmed):
        used, most = percent(reason.utilization_ratio), percent(reason.utilization_ratio_max)
        return f"GPUs are used at {used}, above {most}, but nobody waits and no forecast is sure: no node for that."
    which = f"{reason.nodes_count} of {counted(reason.gpu_nodes_count, 'node')} with GPUs"
    return f"How busy GPUs are cannot be told: {which} {_FAULTS[reason.fault]}; nothing is done for it."


def _why_not_ahead(
    reason: reasons.KeptAsBuffer | reasons.ForecastUncertain | use_reasons.TelemetryUnreliable | use_reasons.UtilizationUnconfirmed,
) -> str:
    if isinstance(reason, use_reasons.TelemetryUnreliable | use_reasons.UtilizationUnconfirmed):
        return _why_use_says_nothing(reason)
    if isinstance(reason, reasons.KeptAsBuffer):
        return f"Its GPUs are kept free for {thing(reason.kept_for)}."
    least = percent(reason.confidence_ratio_min)
    if reason.confidence_ratio is None:
        return f"More demand is foreseen, but no forecast was tried for long enough yet; {least} are asked for."
    how = percent(reason.confidence_ratio)
    return f"More demand is foreseen, but forecasts of late deserve {how} of trust; {least} are asked for."


def _why_overruled(
    reason: reasons.Frozen | reasons.PoolPaused | reasons.OverrideReached | reasons.KeptByOverride,
) -> str:
    match reason:
        case reasons.Frozen(attribution=None):
            return "The policy is frozen: nothing is to be changed."
        case reasons.Frozen():
            return f"Everything is frozen {told(reason.attribution)}."
        case reasons.PoolPaused():
            return f"Pool {reason.pool} is paused {told(reason.attribution)}."
        case reasons.OverrideReached():
            limit = counted(reason.count_max, reason.unit)
            return f"At most {limit} {_of(reason.attribution)} are wanted (now: {reason.count}), {told(reason.attribution)}."
        case reasons.KeptByOverride():
            least = counted(reason.count_min, reason.unit)
            return f"At least {least} {_of(reason.attribution)} are wanted (now: {reason.count}), {told(reason.attribution)}."
        case _:
            assert_never(reason)


def _of(said: Attribution) -> str:
    """`of pool training`, `in all`: what an override counts."""
    parts = said.key.split("/")[1:]
    named_parts = [f"of {kind} {name}" for kind, name in zip(parts[::2], parts[1::2], strict=False)]
    return " ".join(named_parts) or "in all"


def _limit(owner: str, count: int, count_max: int, noun: str) -> str:
    where = "there" if owner == "cluster" else f"in {thing(owner)} there"
    return f"Orders on their way counted, {where} would be more than {counted(count_max, noun)} (now: {count})."


def _why_not_paid(reason: reasons.HourlyPriceLimit | reasons.SpendLimit | reasons.SpendEnforcementBlocked) -> str:
    if isinstance(reason, reasons.SpendEnforcementBlocked):
        most = f"the {money(reason.limit_micro_usd)} that {thing(reason.owner)} may spend in the {reason.period}"
        return f"It will pass {most} ({money(reason.left_micro_usd)} are left) and stays: {reason.protection}."
    if isinstance(reason, reasons.HourlyPriceLimit):
        limit = price(reason.price_micro_usd_per_hour_max)
        return f"Another {price(reason.price_micro_usd_per_hour)} would pass the fleet's limit of {limit}."
    left = max(0, reason.limit_micro_usd - reason.spent_micro_usd - reason.reserved_micro_usd)
    return (
        f"It may cost {money(reason.needed_micro_usd)} until {instant(reason.until)}, and {money(left)} are left of the"
        f" {money(reason.limit_micro_usd)} that {thing(reason.owner)} may spend in the {reason.period}"
        f" ({money(reason.spent_micro_usd)} spent, {money(reason.reserved_micro_usd)} promised)."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
