"""`fold` by example; properties of every history are in `tests/property/test_fold.py`."""

import itertools
from datetime import timedelta

import msgspec
import pytest
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    instance,
    job,
    node,
    notice,
    pod,
    provider_id,
    purchase,
    record,
    request,
)

from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.retention import TOMBSTONE_HOURS
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPlaced, JobRequested, JobResynced, JobStarted
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved, PodWatched
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeWithdrawn
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import Runtime

LIFE = timedelta(hours=TOMBSTONE_HOURS + 1)  # in whole hours, so at most this


class CostSomethingNew(Fact, frozen=True, kw_only=True):
    """A fact type that this version does not have."""


def folded(*stories: Story, into: ClusterState = EMPTY_STATE) -> ClusterState:
    """The state after exactly these facts, without the lists that `given` adds."""
    return fold(into, record([each for story in stories for each in story]))


def pods_listed(*names: str, version: int, epoch: int = EPOCH, at: timedelta = MINUTE) -> Story:
    """A whole list of pods."""
    uids = tuple(PodUid(f"uid-{name}") for name in names)
    return (TimedFact(PodListed(epoch=epoch, version=version, pod_uids=uids, listed_at=T0 + at), T0 + at),)


def pod_gone(name: str, *, version: int, at: timedelta = MINUTE, on: str | None = "n1") -> Story:
    """The deletion of the pod."""
    fact = PodGone(
        epoch=EPOCH, version=version, pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, node_name=on
    )
    return (TimedFact(fact, T0 + at),)


@pytest.mark.parametrize("envelope", list(examples()), ids=lambda envelope: envelope.type)
def test_every_fact_folds_into_an_empty_state(envelope: Envelope) -> None:
    """The example of every fact type folds, once or twice."""
    recorded = Recorded(envelope=envelope, stream=envelope.fact.stream(), sequence=1)
    state = fold(EMPTY_STATE, [recorded])

    assert fold(state, [recorded]) == state


def test_an_unknown_fact_type_changes_nothing() -> None:
    """Facts of a newer publisher are ignored."""
    assert folded((TimedFact(CostSomethingNew(), T0),)) is EMPTY_STATE


def test_facts_without_effect_return_the_same_object() -> None:
    """Shadow plans do not change the state."""
    fact = next(each.fact for each in examples() if isinstance(each.fact, ShadowPlanMade))

    assert folded((TimedFact(fact, T0),)) is EMPTY_STATE


def test_unchanged_tables_are_not_copied() -> None:
    """A fact about a pod does not copy the nodes."""
    state = given(node("n1"), pod("a"))
    after = folded(pod("b"), into=state)

    assert after.nodes is state.nodes
    assert after.pods is not state.pods
    assert "uid-b" not in state.pods


def test_a_list_deletes_older_missing_entities() -> None:
    """Deletions missed by the watch; a pod newer than the list is kept."""
    state = folded(pod("kept"), pod("gone", version=5), pod("newer", version=11), pods_listed("kept", version=10))

    assert set(state.pods) == {"uid-kept", "uid-newer"}
    assert [set(stones) for stones in state.pods_gone.values()] == [{"uid-gone"}]


def test_an_old_observation_does_not_restore_a_deleted_entity() -> None:
    """An observation from before the list has no effect; a later one has."""
    ended = folded(pod("a"), pods_listed(version=10))

    assert folded(pod("a", version=9), into=ended).pods == {}
    assert set(folded(pod("a", version=11), into=ended).pods) == {"uid-a"}


def test_a_list_of_a_new_epoch_deletes_the_old_one() -> None:
    """A recreated cluster starts a new epoch, newer than any old version."""
    state = folded(pod("old", version=1_000), pods_listed(version=1, epoch=EPOCH + 1))

    assert state.pods == {}


def test_a_bookmark_before_the_first_list_has_no_effect() -> None:
    """A watch without a list does not know what is absent."""
    bookmark: Story = (TimedFact(PodWatched(epoch=EPOCH, version=20, watched_at=T0 + HOUR), T0 + HOUR),)

    assert folded(bookmark).pods_synced is None
    after = folded(pods_listed(version=10), bookmark).pods_synced
    assert after is not None
    assert (after.version, after.seen_at) == ((EPOCH, 10), T0 + HOUR)


def test_the_newest_heartbeat_says_which_namespaces_opted_in() -> None:
    """An older one, repeated for the stream, changes nothing; unknown counts as none."""

    def heartbeat(at: timedelta, *names: str, is_known: bool = True) -> Story:
        fact = PodWatched(epoch=EPOCH, version=20, watched_at=T0 + at, opted_in_namespaces=names if is_known else None)
        return (TimedFact(fact, T0 + at),)

    story = (pods_listed(version=10), heartbeat(HOUR, "a", "b"))
    assert folded(*story).opted_in_namespaces == ("a", "b")
    assert folded(*story, heartbeat(30 * MINUTE, "c")).opted_in_namespaces == ("a", "b")
    assert folded(*story, pods_listed(version=30, at=2 * HOUR)).opted_in_namespaces == ()
    assert folded(*story, heartbeat(2 * HOUR, is_known=False)).opted_in_namespaces == ()


def test_a_list_of_the_same_version_refreshes_the_watch() -> None:
    """Nothing changed, but the list is fresh."""
    after = folded(pods_listed("a", version=10), pods_listed("a", version=10, at=HOUR)).pods_synced
    assert after is not None
    assert (after.version, after.seen_at) == ((EPOCH, 10), T0 + HOUR)


def test_a_cancellation_of_an_unknown_job_is_pruned() -> None:
    """Anybody may cancel unknown jobs, with any date. The cancellation of a known job is kept with the job."""
    stray = TimedFact(JobCancelRequested(job_id=JobId("stray")), T0 + 9000 * HOUR)
    wanted = TimedFact(JobCancelRequested(job_id=JobId("train")), T0)
    state = folded(job("train"), (stray, wanted))
    assert set(state.jobs) == {"train", "stray"}
    later = folded(job("new", at=T0 + HOUR), into=state)
    assert set(later.jobs) == {"train", "stray", "new"}
    assert set(folded(job("next", at=T0 + HOUR + LIFE), into=later).jobs) == {"train", "new", "next"}


def test_the_end_of_an_unknown_pod_counts_as_use() -> None:
    """Unknown is not zero: the pod may have been a workload."""
    assert folded(pod_gone("a", version=2)).busy_until == {"n1": T0 + MINUTE}


def test_daemonset_pods_do_not_count_as_use() -> None:
    """They belong to their node."""
    state = folded(pod("a", on="n1", owner_kind="DaemonSet"), pod_gone("a", version=2))

    assert state.busy_until == {}


def test_use_ends_with_the_pod_not_with_its_deletion() -> None:
    """The deletion of a finished pod is not use."""
    state = folded(pod("a", on="n1", phase="succeeded", finished_at=T0), pod_gone("a", version=2, at=HOUR))

    assert state.busy_until == {"n1": T0}


def test_the_earliest_deadline_of_a_notice_wins() -> None:
    """Later facts of the notice only move it forward."""
    state = folded(
        notice("n1", reclaim_at=T0 + 3 * MINUTE),
        notice("n1", reclaim_at=T0 + 2 * MINUTE, at=T0 + SECOND),
        notice("n1", reclaim_at=T0 + 9 * MINUTE, at=T0 + 2 * SECOND),
        notice("n1", at=T0 + 3 * SECOND),
    )
    (kept,) = state.notices.values()

    assert (kept.notice.reclaim_at, kept.first_received_at) == (T0 + 2 * MINUTE, T0)


def test_a_repeated_notice_is_active_again() -> None:
    """A redelivery changes nothing; a new notice is active with its own deadline."""
    withdrawn = SpotNoticeWithdrawn(
        provider_id=provider_id("buy-n1"), kind="terminate", provider_event="1", withdrawn_at=T0 + MINUTE
    )
    old = notice("n1", reclaim_at=T0 + 2 * MINUTE)
    back = folded(old, (TimedFact(withdrawn, T0 + MINUTE),), old)
    again = folded(notice("n1", reclaim_at=T0 + HOUR, at=T0 + 5 * MINUTE), into=back)

    assert [each.is_active for each in back.notices.values()] == [False]
    assert [(each.is_active, each.notice.reclaim_at) for each in again.notices.values()] == [(True, T0 + HOUR)]


def test_a_withdrawal_does_not_affect_a_newer_notice() -> None:
    """A repeat of an old withdrawal changes nothing."""
    withdrawn = SpotNoticeWithdrawn(
        provider_id=provider_id("buy-n1"), kind="terminate", provider_event="1", withdrawn_at=T0
    )
    state = folded(notice("n1", at=T0 + MINUTE), (TimedFact(withdrawn, T0 + HOUR),))

    assert [each.is_active for each in state.notices.values()] == [True]


def test_a_job_id_is_derived_from_the_event() -> None:
    """The scheduler and the state derive the same id."""
    recorded = record([TimedFact(request(None), T0)])
    state = fold(EMPTY_STATE, recorded)

    assert set(state.jobs) == {job_id_of(None, recorded[0].envelope.id)}


def test_the_first_request_of_an_id_is_the_job() -> None:
    """A second request with the same id is answered, not folded."""
    state = folded(job("train")[:1], (TimedFact(request("train", job_name="other"), T0 + MINUTE),))
    requested = state.jobs[JobId("train")].requested

    assert isinstance(requested, JobRequested)
    assert requested.job_name == "train"


def test_a_job_published_again_restores_the_first_request() -> None:
    """Where the stream has discarded it, with or without a repeat of it; otherwise nothing changes."""
    complete = folded(job("train")).jobs[JobId("train")]
    again = JobResynced(
        job_id=JobId("train"), requested=complete.requested, requested_at=complete.requested_at, queued=complete.queued
    )
    resynced = (TimedFact(again, T0 + 2 * MINUTE),)
    repeat = (TimedFact(request("train", job_name="other"), T0 + MINUTE),)
    for story in ((resynced,), (repeat, resynced), (resynced, repeat), (job("train"), repeat, resynced)):
        assert folded(*story).jobs[JobId("train")] == complete


def test_completed_members_are_remembered_without_their_pods() -> None:
    """By one report or a list, and from the job as it is published again; a job that is not known stays so."""
    gone = TimedFact(
        PodGone(epoch=EPOCH, version=9, pod_uid=PodUid("uid-a"), namespace="default", name="a", job_id=JobId("train"),
                phase="succeeded"),
        T0 + MINUTE,
    )  # fmt: skip
    running = pod("a", on="n1", job_id="train", phase="succeeded")
    listed = TimedFact(PodListed(epoch=EPOCH, version=9, pod_uids=(), listed_at=T0 + MINUTE), T0 + MINUTE)
    resynced = TimedFact(JobResynced(job_id=JobId("train"), completed_pods=(PodUid("uid-a"),)), T0 + MINUTE)
    accepted = job("train", members=2)
    for story in (
        (accepted, running, (gone,)),
        (accepted, (gone,), (resynced,)),
        (accepted, (resynced,), (gone,), (gone,)),
        (accepted, running, (listed,)),
        (accepted, (resynced,)),
    ):
        record = folded(*story).jobs[JobId("train")]
        assert (record.completed_pods, record.completed_count) == ((PodUid("uid-a"),), 1), story
    assert folded(running, (gone,)).jobs == {}
    elsewhere = folded(job("train", members=2, runtime=Runtime.PYTORCHJOB), running, (gone,)).jobs[JobId("train")]
    assert elsewhere.completed_count == 0, "it may create all pods anew"


def test_the_start_of_a_job_is_the_earliest_reported() -> None:
    """A restarted watcher reports when it first sees the job running; the stream may keep only that report."""

    def started(version: int, at: timedelta) -> JobStarted:
        return JobStarted(
            epoch=EPOCH, version=version, job_id=JobId("train"), kube_job="jobs/train", started_at=T0 + at
        )

    first, repeat, again = started(2, MINUTE), started(2, 20 * MINUTE), started(3, 30 * MINUTE)
    resynced = JobResynced(job_id=JobId("train"), requested=None, queued=None, started=first)
    for story in ((first, repeat), (repeat, first), (repeat, resynced), (first, repeat, resynced)):
        state = folded(tuple(TimedFact(fact, T0 + HOUR) for fact in story))
        assert state.jobs[JobId("train")].started == first, story
    state = folded(tuple(TimedFact(fact, T0 + HOUR) for fact in (first, again, repeat)))
    assert state.jobs[JobId("train")].started == again, "another start"


def test_a_restarted_watcher_moves_no_start() -> None:
    """Though the Job has changed meanwhile; the start of another attempt it does report."""

    def started(version: int, minutes: int, *, is_found_running: bool = False) -> TimedFact:
        fact = JobStarted(
            epoch=EPOCH, version=version, job_id=JobId("train"), kube_job="jobs/train",
            started_at=T0 + minutes * MINUTE, is_found_running=is_found_running,
        )  # fmt: skip
        return TimedFact(fact, T0 + HOUR)

    def placed(attempt: int, minutes: int) -> TimedFact:
        at = T0 + minutes * MINUTE
        return TimedFact(
            JobPlaced(job_id=JobId("train"), attempt=attempt, node_uids=(), node_names=(), placed_at=at), T0 + HOUR
        )

    seen, found = started(2, 5), started(3, 20, is_found_running=True)
    for order in itertools.permutations((placed(1, 1), seen, found)):
        assert folded(order).jobs[JobId("train")].started == seen.fact
    later = placed(2, 10)
    for order in ((seen, later, found), (later, seen, found), (later, found, seen)):
        assert folded((*order, *reversed(order))).jobs[JobId("train")].started == found.fact
    again = started(4, 30)
    for order in itertools.permutations((seen, found, again)):
        assert folded(order).jobs[JobId("train")].started == again.fact


def test_ended_records_are_pruned_after_retention() -> None:
    """Finished jobs, refused orders, deleted pods and instances; open records stay."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    late = T0 + LIFE
    state = folded(
        job("done"),
        (TimedFact(finished, T0),),
        job("waits"),
        bought(purchase("buy-refused"), is_refused=True),
        bought(purchase("buy-open")),
        instance(purchase("buy-ended"), state="terminated"),
        pod("a"),
        pod_gone("a", version=2, at=timedelta(0)),
        notice("n1", reclaim_at=T0 + MINUTE),
    )
    after = folded(
        job("new", at=late),
        bought(purchase("buy-new", at=late), at=late),
        pod("b", at=late),
        notice("n2", at=late),
        node("n2", at=late)[-1:],
        into=state,
    )

    assert (set(state.jobs), set(after.jobs)) == ({"done", "waits"}, {"waits", "new"})
    assert (set(state.orders), set(after.orders)) == ({"buy-refused", "buy-open"}, {"buy-open", "buy-new"})
    assert (len(state.pods_gone), after.pods_gone) == (1, {})
    assert len(state.notices) == len(after.notices) == 1
    assert (len(state.instances), len(after.instances)) == (2, 2)


def test_pruning_does_not_depend_on_batches() -> None:
    """A fact of a pruned notice is a new notice, wherever the batch ends."""
    told_late = [
        *notice("n1", reclaim_at=T0 + MINUTE),
        *notice("n2", at=T0 + 2 * LIFE),
        *notice("n1", at=T0 + 2 * LIFE),
    ]
    recorded = record(told_late)
    one_by_one = EMPTY_STATE
    for each in recorded:
        one_by_one = fold(one_by_one, [each])

    assert fold(EMPTY_STATE, recorded) == one_by_one
    assert {each.notice.reclaim_at for each in one_by_one.notices.values()} == {None}


def test_streams_age_independently() -> None:
    """While a service catches up, one stream may be days ahead."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    state = folded(pod("b", at=T0 + 10 * LIFE), job("done"), (TimedFact(finished, T0),))

    assert set(state.jobs) == {"done"}


def test_a_future_date_of_a_user_prunes_nothing() -> None:
    """Anybody may publish a request with any date; it does not advance the stream."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    future = (TimedFact(request("odd"), T0 + 1000 * LIFE),)
    state = folded(job("done"), (TimedFact(finished, T0),), future)

    assert set(state.jobs) == {"done", "odd"}


def test_missing_instances_are_pruned() -> None:
    """Missing from lists for the retention of a tombstone."""
    listed = NodeInstanceListed(provider_ids=(), listed_at=T0 + LIFE)
    state = folded(bought(purchase("buy-a")), (TimedFact(listed, T0 + LIFE),))

    assert (state.instances, state.instances_seen_at) == ({}, {})


def test_the_last_plan_is_the_one_of_the_highest_sequence() -> None:
    """A repeat of an older plan does not move the fence back."""
    recorded = record([*bought(purchase("buy-a")), *bought(purchase("buy-b", at=T0 + MINUTE), at=T0 + MINUTE)])
    state = fold(fold(EMPTY_STATE, recorded), recorded[:1])

    assert (state.last_plan_sequence, state.last_plan_at) == (4, T0 + MINUTE)


def test_a_state_round_trips() -> None:
    """Every field decodes to an equal value: snapshots depend on it."""
    state = given(node("n1"), pod("a", on="n1"), job("train", placed_on=("n1",)), notice("n1"), bought(purchase("b")))

    assert msgspec.json.decode(msgspec.json.encode(state), type=ClusterState) == state
    assert isinstance(next(iter(state.pods.values())), PodObserved)
