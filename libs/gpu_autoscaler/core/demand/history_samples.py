"""Demand samples: requested GPUs by model, and scores of past forecasts, as facts."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from gpu_autoscaler.core.demand.sources import job_spec
from gpu_autoscaler.core.next_change import note_whole
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.demand_history import DemandHistory, score
from gpu_autoscaler.core.state.queries import counts_for_idleness, is_member, queue
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingForecastScored
from gpu_autoscaler.model.forecasts import Score

ANY_KIND = "any"  # of work that requests no model, or one of several
_SCORED_AT_ONCE_MAX = 24  # per kind; the rest follows in the next minute


def gpu_counts(state: ClusterState) -> tuple[tuple[str, int], ...]:
    """Return the GPUs requested by running and waiting work, by model, sorted."""
    counts: Counter[str] = Counter()
    with_pods: Counter[str] = Counter()
    for pod in state.pods.values():
        if not counts_for_idleness(pod) or pod.deleting_since is not None or not pod.requests.gpu_count:
            continue
        spec = job_spec(state, pod.job_id)
        counts[pod.gpu_model or (None if spec is None else spec.gpu_model) or ANY_KIND] += pod.requests.gpu_count
        if pod.job_id is not None and is_member(pod):
            with_pods[pod.job_id] += 1
    for job in queue(state):
        if job.queued is not None:
            spec = job.queued.spec
            missing = max(0, spec.member_count - with_pods[spec.job_id] - job.completed_count)
            counts[spec.gpu_model or ANY_KIND] += missing * spec.member_resources.gpu_count
    return tuple(sorted((kind, count) for kind, count in counts.items() if count))


def sample_due(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> tuple[ScalingDemandSampled | ScalingForecastScored, ...]:
    """Return the sample of this minute and scores of completed hours; empty if published already."""
    minute = int(as_of.timestamp()) // 60
    if policy.forecast.is_on:
        note_whole(as_of, 60)
    newest = max((history.levels[-1][0] for history in state.demand_history.values() if history.levels), default=-1)
    # An incomplete list of pods would give too low a sample.
    if not policy.forecast.is_on or minute <= newest or state.pods_synced is None:
        return ()
    scored = (
        ScalingForecastScored(kind=kind, score=due)
        for kind, history in sorted(state.demand_history.items())
        for due in _scores_due(history, state.forecast_scores.get(kind, ()), policy)
    )
    return (ScalingDemandSampled(minute=minute, gpu_counts=gpu_counts(state) or ((ANY_KIND, 0),)), *scored)


def _scores_due(history: DemandHistory, scores: tuple[Score, ...], policy: ScalingPolicy) -> Iterator[Score]:
    last = scores[-1].hour if scores else -1
    for past in [past for past in history.hours[-_SCORED_AT_ONCE_MAX:] if past.hour > last]:
        due = score(history, past.hour, policy.forecast)
        if due is not None:
            yield due
