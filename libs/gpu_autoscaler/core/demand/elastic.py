"""Elastic members: members of a job beyond its gang, each a demand item of its own.

They are served after every gang and pod of the same priority. None is bought for before its gang has a placement.
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


class OrderedBins:
    """Bins of booting and usable nodes by the demand that they were bought for."""

    def __init__(self, views: tuple[NodeView, ...]) -> None:
        self._views = views
        self._bins: dict[str, list[str]] = {}  # of booting nodes
        self._elastic: dict[JobId, list[str]] = {}
        for key, bin_ in _bought_for(view for view in views if view.is_booting):
            self._bins.setdefault(key, []).append(bin_)
            if (job_id := job_of_member(key)) is not None:
                self._elastic.setdefault(job_id, []).append(bin_)

    @cached_property
    def _usable(self) -> dict[str, list[str]]:
        """Bins of usable nodes: their pods are bound soon."""
        bins: dict[str, list[str]] = {}
        for key, bin_ in _bought_for(view for view in self._views if view.is_usable):
            bins.setdefault(key, []).append(bin_)
        return bins

    @cached_property
    def any(self) -> bool:
        """False if no node was bought for waiting work."""
        return bool(self._bins or self._usable)

    def own(self, item: DemandItem) -> str | None:
        """Return the only bin bought for this single member, booting ones first; None: none or several."""
        if item.member_count > 1:
            return None
        keys = self._bins.get(item.key) or self._usable.get(item.key) or []
        return keys[0] if len(keys) == 1 else None

    def of(self, item: DemandItem) -> tuple[str, ...]:
        """Return the bins of the item, and for a pod those of its job, of the gang first.

        An elastic member without a pod has no bins of its gang, and the gang none of its elastic members.
        """
        own = self._bins.get(item.key, ())
        if item.job_id is None or item.source is DemandSource.ELASTIC_MEMBER:
            return tuple(own)
        gang = self._bins.get(f"job/{item.job_id}", ())
        elastic = () if item.source is DemandSource.QUEUED_JOB else self._elastic.get(item.job_id, ())
        return (*own, *gang, *elastic)


def _bought_for(views: Iterable[NodeView]) -> Iterator[tuple[str, str]]:
    for view in views:
        decision = None if view.order is None else view.order.decision
        if decision is not None and isinstance(decision.reason, UnmetDemand | ReplacesAtRiskNode):
            for key in decision.reason.demand:
                yield key, bin_key(view)


@cached_by_identity(2)
def ordered_bins(views: tuple[NodeView, ...]) -> OrderedBins:
    """Return the bins of these views."""
    return OrderedBins(views)


def deferred_elastic_members(planned: Mapping[str, object], job_id: JobId) -> tuple[str, ...]:
    """Return the keys of the elastic members of a job that the last plan deferred, in order."""
    keys = (key for key in planned if job_of_member(key) == job_id)
    return tuple(sorted(keys, key=lambda key: int(key.rpartition("/")[2])))
