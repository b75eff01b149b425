"""Histories of a cluster drawn by hypothesis: interleaved life cycles of pods, nodes, notices and jobs.

A life cycle is a sequence of facts with one of several courses. The publication order is drawn, and instants and
versions are stamped in that order. Sometimes the watch misses an end, and the next full list reports it.
"""

from datetime import datetime, timedelta
from random import Random

import msgspec
from hypothesis import strategies as st
from tests.support import stories
from tests.support.stories import EPOCH, T0, TimedFact, record

from gpu_autoscaler.events import gpu, job, node, pod, scaling, spot
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import CancelDrain, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler.model.reasons.drain import BootTimedOut, DemandReturned

_GAPS = (timedelta(0), timedelta(seconds=5), timedelta(minutes=3), timedelta(minutes=40), timedelta(hours=4))
# Instants at which a fact's own thing happened: now, whenever that is.
_NOW = frozenset(
    {
        "cancelled_at", "drained_at", "evicted_at", "finished_at", "launched_at", "listed_at", "placed_at",
        "preempted_at", "queued_at", "received_at", "refused_at", "started_at", "terminated_at", "watched_at",
        "window_started_at", "withdrawn_at",
    }
)  # fmt: skip
_COUNTED = (pod.PodObserved, pod.PodGone, node.NodeObserved, node.NodeGone, job.JobStarted, gpu.GpuNodeSummarized)
_LISTED = (pod.PodListed, pod.PodWatched, node.NodeListed, node.NodeWatched)


def _stamped(fact: Fact, at: datetime, version: int) -> Fact:
    """Return the fact as published at this instant, at this version of the cluster."""
    changes: dict[str, object] = {
        name: at for name in fact.__struct_fields__ if name in _NOW and getattr(fact, name) is not None
    }
    if isinstance(fact, _COUNTED + _LISTED):
        changes["version"] = version
    if isinstance(fact, spot.SpotNoticeReceived) and fact.reclaim_at is not None:
        changes["reclaim_at"] = at + (fact.reclaim_at - T0)
    if isinstance(fact, scaling.ScalingPlanMade):
        changes["plan"] = msgspec.structs.replace(fact.plan, as_of=at)
    return msgspec.structs.replace(fact, **changes)


def _facts(*told: stories.Story) -> list[Fact]:
    return [each.fact for story in told for each in story]


def _pod_life(name: str, rng: Random) -> list[Fact]:
    on, uid = f"n{rng.randrange(3)}", PodUid(f"uid-{name}")
    owner_kind = rng.choice(("Job", "Job", "DaemonSet"))
    life = _facts(stories.pod(name, owner_kind=owner_kind, job_id="job-0"))
    if rng.random() < 0.8:
        life += _facts(stories.pod(name, on=on, owner_kind=owner_kind, job_id="job-0"))
    if rng.random() < 0.4:
        life += _facts(stories.pod(name, on=on, owner_kind=owner_kind, phase="succeeded", finished_at=T0))
    if rng.random() < 0.6:
        life.append(pod.PodGone(epoch=EPOCH, version=0, pod_uid=uid, namespace="default", name=name, node_name=on))
    return life


def _node_life(name: str, rng: Random) -> list[Fact]:
    decision = stories.purchase(f"buy-{name}")
    if rng.random() < 0.2:
        return _facts(stories.bought(decision, is_refused=True))
    life = _facts(stories.bought(decision))
    if rng.random() < 0.2:
        release = ReleaseInstance(
            action_id=ActionId(f"release-{name}"),
            provider_id=stories.provider_id(decision.action_id),
            order_action_id=decision.action_id,
            reason=BootTimedOut(booting_seconds=900.0, boot_seconds_max=900.0),
        )
        return [*life, *_facts(stories.planned(release, plan_id=f"plan-{name}")), *_end(name, release.action_id)]
    life += _facts(
        stories.node(name, is_ready=False)[-1:], stories.node(name, gpus_allocatable=0)[-1:], stories.node(name)[-1:]
    )
    life.append(_summary(name))
    if rng.random() < 0.5:
        life += _notices(name, rng)
    if rng.random() < 0.7:
        life += _drain(name, rng)
    return life


def _summary(name: str) -> Fact:
    return gpu.GpuNodeSummarized(
        epoch=1,
        version=0,
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        window_started_at=T0,
        window_seconds=60.0,
        scrapes_expected_count=6,
        scrapes_answered_count=6,
        gpus=(),
    )


def _notices(name: str, rng: Random) -> list[Fact]:
    life: list[Fact] = []
    for minutes in rng.sample((None, 1, 2, 30), k=rng.randrange(1, 4)):
        reclaim_at = None if minutes is None else T0 + timedelta(minutes=minutes)
        life += _facts(stories.notice(name, reclaim_at=reclaim_at))
        if rng.random() < 0.3:
            life.append(
                spot.SpotNoticeWithdrawn(
                    provider_id=stories.provider_id(f"buy-{name}"),
                    kind="terminate",
                    provider_event="1",
                    withdrawn_at=T0,
                )
            )
    return life


def _drain(name: str, rng: Random) -> list[Fact]:
    life = _facts(stories.drained(name))
    started = life[-1]
    assert isinstance(started, scaling.ScalingDrainStarted)
    action_id, plan_id, uid = started.action_id, started.plan_id, started.node_uid
    if rng.random() < 0.3:
        cancel = CancelDrain(
            action_id=ActionId(f"cancel-{name}"),
            drain_action_id=action_id,
            node_uid=uid,
            node_name=name,
            reason=DemandReturned(demand=("job/job-0",)),
        )
        cancelled = scaling.ScalingDrainCancelled(
            action_id=cancel.action_id,
            plan_id=plan_id,
            drain_action_id=action_id,
            node_uid=uid,
            node_name=name,
            cancelled_at=T0,
        )
        return [*life, *_facts(stories.planned(cancel, plan_id=f"plan-cancel-{name}")), cancelled]
    life += [
        scaling.ScalingPodEvicted(
            action_id=action_id,
            plan_id=plan_id,
            node_name=name,
            pod_uid=PodUid("uid-p0"),
            pod="default/p0",
            is_forced=is_forced,
            evicted_at=T0,
        )
        for is_forced in (False, True)
    ]
    life.append(
        scaling.ScalingNodeDrained(
            action_id=action_id,
            plan_id=plan_id,
            node_uid=uid,
            node_name=name,
            provider_id=started.provider_id,
            drained_at=T0,
        )
    )
    return [*life, *_end(name, action_id), node.NodeGone(epoch=EPOCH, version=0, node_uid=uid, name=name)]


def _end(name: str, action_id: ActionId) -> list[Fact]:
    terminated = scaling.ScalingNodeTerminated(
        action_id=action_id,
        plan_id=PlanId(f"plan-{action_id}"),
        provider_id=stories.provider_id(f"buy-{name}"),
        order_action_id=ActionId(f"buy-{name}"),
        node_name=name,
        terminated_at=T0,
    )
    return [*_facts(stories.instance(stories.purchase(f"buy-{name}"), state="terminated")), terminated]


def _job_life(name: str, rng: Random) -> list[Fact]:
    job_id = JobId(name)
    requested, queued = _facts(stories.job(name))
    if rng.random() < 0.2:
        mistakes = (Violation("job_name", "is empty"),)
        return [requested, job.JobRejected(request_id=f"request-{name}", violations=mistakes, job_id=job_id)]
    life = [requested, queued]
    for attempt in range(1, rng.randrange(1, 4)):
        life.append(
            job.JobPlaced(
                job_id=job_id, attempt=attempt, node_uids=(NodeUid("uid-n0"),), node_names=("n0",), placed_at=T0
            )
        )
        life.append(job.JobStarted(epoch=EPOCH, version=0, job_id=job_id, kube_job=f"jobs/{name}", started_at=T0))
        if rng.random() < 0.5:
            life.append(job.JobPreempted(job_id=job_id, attempt=attempt, cause="notice", preempted_at=T0))
    if rng.random() < 0.3:
        life.append(job.JobCancelRequested(job_id=job_id))
    if rng.random() < 0.7:
        life.append(job.JobFinished(job_id=job_id, outcome="completed", finished_at=T0))
    return life


def _lists(said: list[Fact], rng: Random) -> list[Fact]:
    """Whole lists and signs of life as the watch would send them now; some pods ended unseen."""
    pods = {fact.pod_uid for fact in said if isinstance(fact, pod.PodObserved)}
    pods -= {fact.pod_uid for fact in said if isinstance(fact, pod.PodGone)}
    nodes = {fact.node_uid for fact in said if isinstance(fact, node.NodeObserved)}
    nodes -= {fact.node_uid for fact in said if isinstance(fact, node.NodeGone)}
    instances = {fact.provider_id for fact in said if isinstance(fact, node.NodeInstanceObserved)}
    kept = tuple(sorted(uid for uid in pods if rng.random() < 0.8))
    return [
        pod.PodListed(epoch=EPOCH, version=0, pod_uids=kept, listed_at=T0),
        node.NodeListed(epoch=EPOCH, version=0, node_uids=tuple(sorted(nodes)), listed_at=T0),
        node.NodeInstanceListed(provider_ids=tuple(sorted(instances)), listed_at=T0),
        pod.PodWatched(epoch=EPOCH, version=0, watched_at=T0),
        node.NodeWatched(epoch=EPOCH, version=0, watched_at=T0),
    ]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Recorded, ...]:
    """A history in the order in which it happened, numbered by stream."""
    rng = draw(st.randoms(use_true_random=False))
    lives = [_pod_life(f"p{number}", rng) for number in range(rng.randrange(4))]
    lives += [_node_life(f"n{number}", rng) for number in range(rng.randrange(3))]
    lives += [_job_life(f"job-{number}", rng) for number in range(rng.randrange(3))]
    rows = [row for row in lives if row]
    at, version = T0, 0
    told: list[TimedFact] = []
    said: list[Fact] = []
    while rows:
        at, version = at + rng.choice(_GAPS), version + 1
        row = rng.choice(rows)
        # Hypothesis often draws zeros, with which a history must end.
        facts = _lists(said, rng) if rng.random() > 0.8 else [row.pop(0)]
        rows = [each for each in rows if each]
        for fact in facts:
            stamped = _stamped(fact, at, version)
            said.append(stamped)
            told.append(TimedFact(stamped, at))
    return record(told)


@st.composite
def retellings(draw: st.DrawFn, history: tuple[Recorded, ...]) -> list[list[Recorded]]:
    """The same history for another reader: streams interleaved differently, facts repeated up to six hours of their
    stream's time later, and all of it split into batches."""
    rng = draw(st.randoms(use_true_random=False))
    streams: dict[str, list[Recorded]] = {}
    for each in history:
        streams.setdefault(each.stream, []).append(each)
    for name, facts in streams.items():
        streams[name] = _with_repeats(facts, rng)
    batches: list[list[Recorded]] = [[]]
    while streams:
        name = rng.choice(sorted(streams))
        taken = rng.choice((1, 1, 3, len(streams[name])))  # now and then one stream runs far ahead of the others
        batches[-1] += streams[name][:taken]
        streams[name] = streams[name][taken:]
        if not streams[name]:
            del streams[name]
        if rng.random() < 0.5:
            batches.append([])
    return batches


def _with_repeats(facts: list[Recorded], rng: Random) -> list[Recorded]:
    told: list[Recorded] = []
    for each in facts:
        told.append(each)
        recent = [past for past in told if each.envelope.time - past.envelope.time < timedelta(hours=6)]
        if rng.random() < 0.3:
            told.append(rng.choice(recent))
    return told
