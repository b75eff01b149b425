"""The one thing that has to change before what was held back happens. Each reason has its own: `why` ends with it.

A reason without a remedy is an error of the type checker. Used by `core/headline.py`.
"""

from typing import assert_never

from gpu_autoscaler.core.words.waiting import Waiting, over_when
from gpu_autoscaler.core.words.wording import counted, instant, money, named, percent, price, span, thing
from gpu_autoscaler.model import reasons, shape_reasons, use_reasons
from gpu_autoscaler.model.directives import FOR_GOOD

_Keeping = (
    reasons.NotYetIdle
    | reasons.PodProtected
    | reasons.NodeProtected
    | reasons.PodsFitNowhere
    | reasons.DisruptionBudgetReached
    | reasons.MinimumReached
    | reasons.SavingTooSmall
    | reasons.TooManyUnhealthy
    | reasons.KeptAsBuffer
    | reasons.SpendEnforcementBlocked
)
_Overruling = reasons.Frozen | reasons.PoolPaused | reasons.OverrideReached | reasons.KeptByOverride
_Limiting = reasons.NodesLimit | reasons.GpusLimit | reasons.HourlyPriceLimit | reasons.SpendLimit | reasons.Cooldown
_Unready = (
    shape_reasons.NoDomainFits
    | shape_reasons.VolumeNotReady
    | shape_reasons.DeviceClaimsUnsupported
    | shape_reasons.GroupIncomplete
)


_Doubting = reasons.ForecastUncertain | use_reasons.TelemetryUnreliable | use_reasons.UtilizationUnconfirmed


def remedy(reason: reasons.DeferReason) -> str:
    """Return what has to change, as the end of `it starts when ...` or `it goes when ...`."""
    if isinstance(reason, Waiting):
        return over_when(reason)
    if isinstance(reason, _Keeping):
        return _of_keeping(reason)
    if isinstance(reason, _Overruling):
        return _of_overruling(reason)
    if isinstance(reason, _Limiting):
        return _of_limiting(reason)
    if isinstance(reason, _Doubting):
        return _of_doubting(reason)
    if isinstance(reason, _Unready):
        return _of_unready(reason)
    match reason:
        case reasons.NoOfferFits():
            return "something that can hold it is for sale, or it asks for less"
        case reasons.PodConstraintsViolated():
            return f"a node can be had where its rules leave room ({named(reason.rules)}), or pods there go"
        case reasons.OffersUnavailable():
            return f"the cloud has capacity again, which it is asked for after {instant(reason.retry_at)}"
        case reasons.PriceUnknown():
            return f"a price of {named(reason.offers)} is known"
        case reasons.WatchStale():
            return f"the list of {reason.source} is read again"
        case _:
            assert_never(reason)


def _of_doubting(reason: _Doubting) -> str:
    match reason:
        case reasons.ForecastUncertain():
            least = percent(reason.confidence_ratio_min)
            return f"forecasts have been right enough for long enough ({least}), or confidence_ratio_min is lowered"
        case use_reasons.TelemetryUnreliable():
            return "their exporters answer again, with figures that can be"
        case use_reasons.UtilizationUnconfirmed():
            return "work waits for a node, a forecast is sure, or utilization_trigger is direct"
        case _:
            assert_never(reason)


def _of_unready(reason: _Unready) -> str:
    match reason:
        case shape_reasons.NoDomainFits():
            return f"one value of {reason.topology_key} has room for all {counted(reason.members_count, 'member')}"
        case shape_reasons.VolumeNotReady():
            return f"its volume is there ({reason.detail})"
        case shape_reasons.DeviceClaimsUnsupported():
            return "its claims ask for so many GPUs by what is known before they are there (product, memory, profile)"
        case shape_reasons.GroupIncomplete():
            missing = counted(reason.members_count_min - reason.members_present, "pod")
            return f"the other {missing} that {thing(reason.group)} needs can be seen"
        case _:
            assert_never(reason)


def _of_limiting(reason: _Limiting) -> str:
    match reason:
        case reasons.NodesLimit():
            most = f"nodes_count_max ({reason.nodes_count_max}){_whose(reason.owner)}"
            return f"one of {counted(reason.nodes_count, 'node')} goes, or {most} is raised"
        case reasons.GpusLimit():
            most = f"gpu_count_max ({reason.gpu_count_max}){_whose(reason.owner)}"
            return f"some of {counted(reason.gpu_count, 'GPU')} go, or {most} is raised"
        case reasons.HourlyPriceLimit():
            most = price(reason.price_micro_usd_per_hour_max)
            return f"something dear goes, or price_micro_usd_per_hour_max ({most}) is raised"
        case reasons.SpendLimit():
            most = f"{reason.period}_micro_usd_max ({money(reason.limit_micro_usd)}){_whose(reason.owner)}"
            begins = f"the next {reason.period} begins at {instant(reason.until)}"
            return f"{begins}, something that runs ends early, or {most} is raised"
        case reasons.Cooldown():
            return f"the cooldown is over, in {span(reason.remaining_seconds)}"
        case _:
            assert_never(reason)


def _whose(owner: str) -> str:
    return "" if owner == "cluster" else f" of {thing(owner)}"


def _of_overruling(reason: _Overruling) -> str:
    if reason.attribution is None:
        return "the policy's is_frozen is false again"
    if reason.attribution.until >= FOR_GOOD:
        return "the policy says otherwise"
    again = f"gpu-autoscaler resume {reason.attribution.key}"
    return f"that is over at {instant(reason.attribution.until)}, or somebody takes it back before ({again})"


def _of_keeping(reason: _Keeping) -> str:
    match reason:
        case reasons.NotYetIdle():
            left = span(max(0.0, reason.idle_seconds_max - reason.idle_seconds))
            return f"nothing has run there for {span(reason.idle_seconds_max)}, in {left}"
        case reasons.PodProtected():
            return f"pod {reason.pod} ends, or may be disturbed ({reason.protection})"
        case reasons.NodeProtected():
            return f"that mark is taken off the node ({reason.protection})"
        case reasons.PodsFitNowhere():
            return f"there is room for its {counted(len(reason.pods), 'pod')} on other nodes"
        case reasons.DisruptionBudgetReached():
            return (
                f"one of {counted(reason.disrupting_count, 'node')} on the way out is gone, or the budget allows more"
            )
        case reasons.MinimumReached():
            return f"there are more nodes, or nodes_count_min ({reason.nodes_count_min}) is lowered"
        case reasons.SavingTooSmall():
            return f"it saves {percent(reason.saving_ratio_min)}, or consolidation_saving_ratio_min is lowered"
        case reasons.TooManyUnhealthy():
            return f"somebody has looked at them, or unhealthy_ratio_max ({percent(reason.unhealthy_ratio_max)}) is raised"
        case reasons.SpendEnforcementBlocked():
            return "what protects its work is taken away"
        case reasons.KeptAsBuffer():
            return f"its GPUs are not kept for {thing(reason.kept_for)} any more"
        case _:
            assert_never(reason)
