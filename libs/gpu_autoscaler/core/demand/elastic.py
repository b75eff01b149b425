"""Elastic members: members of a job beyond its gang, each a demand item of its own.

They are served after every gang and pod of the same priority. None is bought for before its gang has a placement.
"""

from collections.abc import Iterator, Mapping, Sequence

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.nodes.views import Grouped, NodeView, bin_key, table_of
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand

_KIND = "member/"


def elastic_members(spec: JobSpec, shape: Shape, queued_at: Instant, present_count: int) -> Iterator[DemandItem]:
    """Yield an item per member beyond the gang and beyond existing or placed members. None if all members share the
    value of a node label, which is unknown until the gang is placed."""
    if spec.within is not None:
        return
    for number in range(max(spec.gang_count, present_count) + 1, spec.member_count + 1):
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
    """Return the job of an elastic member by its key; None: the key is of something else."""
    return JobId(key.removeprefix(_KIND).rpartition("/")[0]) if key.startswith(_KIND) else None


def elastic_job_of(demand: tuple[str, ...]) -> JobId | None:
    """Return the job if all keys are elastic members of it; else None."""
    jobs = {job_of_member(key) for key in demand}
    return jobs.pop() if len(jobs) == 1 else None


def _bought_for(view: NodeView) -> tuple[str, ...]:
    decision = None if view.order is None else view.order.decision
    reason = None if decision is None else decision.reason
    return reason.demand if isinstance(reason, UnmetDemand | ReplacesAtRiskNode) else ()


_BOOTING = Grouped(lambda view: _bought_for(view) if view.is_booting else ())
_USABLE = Grouped(lambda view: _bought_for(view) if view.is_usable else ())
_ELASTIC = Grouped(
    lambda view: [job_id for key in _bought_for(view) if view.is_booting and (job_id := job_of_member(key))]
)


class OrderedBins:
    """Bins of booting and usable nodes by the demand that they were bought for."""

    def __init__(self, views: Sequence[NodeView]) -> None:
        self._bins = table_of(views, _BOOTING)
        self._elastic = table_of(views, _ELASTIC)
        self._usable = table_of(views, _USABLE)  # their pods are bound soon

    @property
    def any(self) -> bool:
        """False if no node was bought for waiting work."""
        return bool(self._bins or self._usable)

    def own(self, item: DemandItem) -> str | None:
        """Return the only bin bought for this single member, booting ones first; None: none or several."""
        if item.member_count > 1:
            return None
        views = self._bins.get(item.key) or self._usable.get(item.key) or ()
        return bin_key(views[0]) if len(views) == 1 else None

    def bought_for(self, item: DemandItem) -> frozenset[str]:
        """Return all bins that were bought for this item, whether they boot or are usable."""
        return frozenset(map(bin_key, (*self._bins.get(item.key, ()), *self._usable.get(item.key, ()))))

    def of(self, item: DemandItem) -> tuple[str, ...]:
        """Return the bins of the item, and for a pod those of its job, of the gang first.

        An elastic member without a pod has no bins of its gang, and the gang none of its elastic members.
        """
        own = self._bins.get(item.key, ())
        if item.job_id is None or item.source is DemandSource.ELASTIC_MEMBER:
            return tuple(map(bin_key, own))
        gang = self._bins.get(f"job/{item.job_id}", ())
        elastic = () if item.source is DemandSource.QUEUED_JOB else self._elastic.get(item.job_id, ())
        return tuple(map(bin_key, (*own, *gang, *elastic)))


def deferred_elastic_members(planned: Mapping[str, object], job_id: JobId) -> tuple[str, ...]:
    """Return the keys of the elastic members of a job that the last plan deferred, in order."""
    keys = (key for key in planned if job_of_member(key) == job_id)
    return tuple(sorted(keys, key=lambda key: int(key.rpartition("/")[2])))
