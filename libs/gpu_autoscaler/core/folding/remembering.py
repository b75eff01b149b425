"""What facts about demand, forecasts and gangs make of what is remembered of them. Used by `core/fold.py`."""

from datetime import datetime

from gpu_autoscaler.core.folding.batch import Batch
from gpu_autoscaler.core.reports import SOURCES_COUNT_MAX, mistakes_of
from gpu_autoscaler.core.rises import EMPTY_HISTORY, HOURS_COUNT_MAX, sampled
from gpu_autoscaler.core.state import GangRecord, ReportedDemandRecord
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingForecastScored
from gpu_autoscaler.model.reasons import DrainReason, GangAbandoned, ReleaseReason
from gpu_autoscaler.model.waits import GangBackoff


def fold_demand_history(batch: Batch, fact: ScalingDemandSampled | ScalingForecastScored) -> None:
    """Put one more minute, or the score of one more hour, into the batch; what is not newer changes nothing."""
    if isinstance(fact, ScalingDemandSampled):
        histories, now = batch.demand_history, dict(fact.gpu_counts)
        for kind in sorted({*now, *histories.now}):  # a kind that is not named any more is asked for by nobody
            before = histories.get(kind) or EMPTY_HISTORY
            after = sampled(before, fact.minute, now.get(kind, 0))
            if after is not before:
                histories.set(kind, after)
        return
    scores = batch.forecast_scores.get(fact.kind) or ()
    if not scores or fact.score.hour > scores[-1].hour:
        batch.forecast_scores.set(fact.kind, (*scores, fact.score)[-HOURS_COUNT_MAX:])


def fold_abandoned_gang(batch: Batch, reason: DrainReason | ReleaseReason, planned_at: datetime) -> None:
    """Count a gang that was given up, once a plan; what comes late for one that waits already is no new try."""
    if not isinstance(reason, GangAbandoned) or reason.defer_reason == GangBackoff.tag():
        return
    before = batch.gangs.get(reason.gang)
    if before is None or planned_at > before.abandoned_at:
        count = 1 if before is None else before.abandoned_count + 1
        batch.gangs.set(reason.gang, GangRecord(abandoned_count=count, abandoned_at=planned_at))


def fold_reported_demand(batch: Batch, fact: DemandReported, at: datetime, sequence: int) -> None:
    """The last word of a source counts; "not known" leaves the word before it, and what cannot be meant is none.

    The last one by its place in the stream: one that is read again changes nothing. Anybody may say it, with any date,
    so it moves no clock: a wish that is over is passed over by its readers, and makes room for others here.
    """
    if fact.count is None or mistakes_of(fact, at):
        return
    wishes = batch.reported_demand
    known = wishes.now.get(fact.source)
    if known is not None and known.sequence >= sequence:
        return
    wishes.set(fact.source, ReportedDemandRecord(reported=fact, reported_at=at, sequence=sequence))
    if len(wishes.now) > SOURCES_COUNT_MAX:
        wishes.remove(min(wishes.now, key=lambda source: (wishes.now[source].reported.until, source)))
