"""Members that a job starts without: each an item of demand of its own, beside the gang that starts together.

The gang is one transaction, whole or not at all. Each further member is one by itself, served after every gang and pod
of the same priority, so it takes no room, limit or money from them; and none is bought for before its gang has a place.
Asked by `core/demand/sources.py`, the plan and the scheduler.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.placement.bins import bin_key
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand

_KIND = "member/"


def elastic_members(spec: JobSpec, shape: Shape, queued_at: Instant, there_count: int) -> Iterator[DemandItem]:
    """One item for each member beyond the gang and beyond those that are there, as pods or with a place.

    None where all members share a label's value: which one, nobody knows before the gang has its place.
    """
    if spec.within is not None:
        return
    for number in range(max(spec.gang_count, there_count) + 1, spec.member_count + 1):
        yield DemandItem(
            key=f"{_KIND}{spec.job_id}/{number}",
            source=DemandSource.ELASTIC_MEMBER,
            shape=shape,
            member_count=1,
            start_by_at=spec.start_by_at,
            priority=spec.priority,
            since=queued_at,
            job_id=spec.job_id,
            project=spec.project_id,
            work_seconds_max=spec.duration_seconds_max,
        )


def job_of_member(key: str) -> JobId | None:
    """Return the job of a further member by the member's key; None: the key is of something else."""
    return JobId(key.removeprefix(_KIND).rpartition("/")[0]) if key.startswith(_KIND) else None


def elastic_job_of(demand: tuple[str, ...]) -> JobId | None:
    """Return the job where all of this demand are further members of one; None: it is somebody else's as well."""
    jobs = {job_of_member(key) for key in demand}
    return jobs.pop() if len(jobs) == 1 else None


class OrderedBins:
    """The bins that are on their way, and those that came, by what they were bought for."""

    def __init__(self, views: tuple[NodeView, ...]) -> None:
        self._views = views
        self._bins: dict[str, list[str]] = {}  # that are on their way
        self._further: dict[JobId, list[str]] = {}
        for key, bin_ in _bought_for(view for view in views if view.is_booting):
            self._bins.setdefault(key, []).append(bin_)
            if (job_id := job_of_member(key)) is not None:
                self._further.setdefault(job_id, []).append(bin_)

    @cached_property
    def _came(self) -> dict[str, list[str]]:
        """Those that are usable now: a pod is bound there a moment later, or as late as others that it waits for."""
        found: dict[str, list[str]] = {}
        for key, bin_ in _bought_for(view for view in self._views if view.is_usable):
            found.setdefault(key, []).append(bin_)
        return found

    @cached_property
    def any(self) -> bool:
        """False where nothing was bought for anybody that could still wait for it."""
        return bool(self._bins or self._came)

    def own(self, item: DemandItem) -> str | None:
        """The one bin that was bought for this single member, one on its way first; None: there is none, or several."""
        if item.member_count > 1:
            return None
        keys = self._bins.get(item.key) or self._came.get(item.key) or []
        return keys[0] if len(keys) == 1 else None

    def of(self, item: DemandItem) -> tuple[str, ...]:
        """Keys of the item's bins: its own, and for a pod those of its job, of the gang before those beyond it.

        A further member without a pod has none of its gang's, and the gang none of its.
        """
        own = self._bins.get(item.key, ())
        if item.job_id is None or item.source is DemandSource.ELASTIC_MEMBER:
            return tuple(own)
        gang = self._bins.get(f"job/{item.job_id}", ())
        further = () if item.source is DemandSource.QUEUED_JOB else self._further.get(item.job_id, ())
        return (*own, *gang, *further)


def _bought_for(views: Iterable[NodeView]) -> Iterator[tuple[str, str]]:
    """What each of these nodes was bought for, with its bin."""
    for view in views:
        decision = None if view.order is None else view.order.decision
        if decision is not None and isinstance(decision.reason, UnmetDemand | ReplacesAtRiskNode):
            for key in decision.reason.demand:
                yield key, bin_key(view)


@cached_by_identity(2)
def ordered_bins(views: tuple[NodeView, ...]) -> OrderedBins:
    """Return the same for the same views."""
    return OrderedBins(views)


def deferred_elastic_members(planned: Mapping[str, object], job_id: JobId) -> tuple[str, ...]:
    """Keys of a job's further members that the last plan held back, in their order."""
    keys = (key for key in planned if job_of_member(key) == job_id)
    return tuple(sorted(keys, key=lambda key: int(key.rpartition("/")[2])))
