"""`fold`, case by case; what holds for any history is in `tests/property/test_fold.py`."""

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
    Told,
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
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobRequested
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved, PodWatched
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeWithdrawn
from gpu_autoscaler.model.ids import JobId, PodUid

LIFE = timedelta(hours=TOMBSTONE_HOURS + 1)  # in whole hours, so at most this


class CostSomethingNew(Fact, frozen=True, kw_only=True):
    """A fact of a catalogue that this version does not have."""


def told(*stories: Story, into: ClusterState = EMPTY_STATE) -> ClusterState:
    """The state after exactly these facts, without the lists that `given` adds."""
    return fold(into, record([each for story in stories for each in story]))


def pods_listed(*names: str, version: int, epoch: int = EPOCH, at: timedelta = MINUTE) -> Story:
    """A whole list of pods."""
    uids = tuple(PodUid(f"uid-{name}") for name in names)
    return (Told(PodListed(epoch=epoch, version=version, pod_uids=uids, listed_at=T0 + at), T0 + at),)


def pod_gone(name: str, *, version: int, at: timedelta = MINUTE, on: str | None = "n1") -> Story:
    """The pod's object is gone."""
    fact = PodGone(
        epoch=EPOCH, version=version, pod_uid=PodUid(f"uid-{name}"), namespace="default", name=name, node_name=on
    )
    return (Told(fact, T0 + at),)


@pytest.mark.parametrize("envelope", list(examples()), ids=lambda envelope: envelope.type)
def test_any_fact_about_things_never_heard_of_is_taken(envelope: Envelope) -> None:
    """The catalogue's own example of each fact folds into an empty state, twice as well as once."""
    recorded = Recorded(envelope=envelope, stream=envelope.fact.stream(), sequence=1)
    state = fold(EMPTY_STATE, [recorded])

    assert fold(state, [recorded]) == state


def test_a_fact_that_this_version_does_not_know_changes_nothing() -> None:
    """A newer publisher's facts pass by."""
    assert told((Told(CostSomethingNew(), T0),)) is EMPTY_STATE


def test_facts_without_effect_leave_the_very_same_state() -> None:
    """What another policy would do follows from state and never leads to it."""
    fact = next(each.fact for each in examples() if isinstance(each.fact, ShadowPlanMade))

    assert told((Told(fact, T0),)) is EMPTY_STATE


def test_a_mapping_that_a_batch_does_not_touch_is_not_copied() -> None:
    """A fact about a pod costs nothing for the nodes."""
    state = given(node("n1"), pod("a"))
    after = told(pod("b"), into=state)

    assert after.nodes is state.nodes
    assert after.pods is not state.pods
    assert "uid-b" not in state.pods


def test_a_whole_list_ends_what_is_older_and_not_in_it() -> None:
    """Gone while the watch was deaf: the list tells. A pod newer than the list is not in doubt."""
    state = told(pod("kept"), pod("gone", version=5), pod("newer", version=11), pods_listed("kept", version=10))

    assert set(state.pods) == {"uid-kept", "uid-newer"}
    assert [set(stones) for stones in state.pods_gone.values()] == [{"uid-gone"}]


def test_what_a_list_ended_is_not_brought_back_by_an_old_word() -> None:
    """A late observation from before the list stays without effect; one from after it counts."""
    ended = told(pod("a"), pods_listed(version=10))

    assert told(pod("a", version=9), into=ended).pods == {}
    assert set(told(pod("a", version=11), into=ended).pods) == {"uid-a"}


def test_a_list_of_a_new_epoch_ends_everything_of_the_old_one() -> None:
    """A cluster that was made anew counts from the start; its first list is newer than any old version."""
    state = told(pod("old", version=1_000), pods_listed(version=1, epoch=EPOCH + 1))

    assert state.pods == {}


def test_a_bookmark_before_the_first_list_proves_nothing() -> None:
    """A watch that never listed cannot know what is absent."""
    bookmark: Story = (Told(PodWatched(epoch=EPOCH, version=20, watched_at=T0 + HOUR), T0 + HOUR),)

    assert told(bookmark).pods_synced is None
    after = told(pods_listed(version=10), bookmark).pods_synced
    assert after is not None
    assert (after.version, after.seen_at) == ((EPOCH, 10), T0 + HOUR)


def test_a_list_of_the_same_version_is_a_sign_of_life() -> None:
    """Nothing changed since the last list, and somebody has just looked: the picture is fresh."""
    after = told(pods_listed("a", version=10), pods_listed("a", version=10, at=HOUR)).pods_synced
    assert after is not None
    assert (after.version, after.seen_at) == ((EPOCH, 10), T0 + HOUR)


def test_a_cancellation_of_an_unknown_job_is_not_kept_for_ever() -> None:
    """Anybody may ask for the end of jobs that never were: they are forgotten, and the dates they carry count nothing.

    The cancellation of a job that is there is kept as long as the job.
    """
    stray = Told(JobCancelRequested(job_id=JobId("stray")), T0 + 9000 * HOUR)
    wanted = Told(JobCancelRequested(job_id=JobId("train")), T0)
    state = told(job("train"), (stray, wanted))
    assert set(state.jobs) == {"train", "stray"}
    later = told(job("new", at=T0 + HOUR), into=state)
    assert set(later.jobs) == {"train", "stray", "new"}
    assert set(told(job("next", at=T0 + HOUR + LIFE), into=later).jobs) == {"train", "new", "next"}


def test_the_end_of_an_unknown_pod_keeps_its_node_busy_until_then() -> None:
    """Unknown is not zero: nobody knows that the pod did not count."""
    assert told(pod_gone("a", version=2)).busy_until == {"n1": T0 + MINUTE}


def test_pods_that_do_not_count_leave_no_trace_of_use() -> None:
    """DaemonSet pods come and go with their node."""
    state = told(pod("a", on="n1", owner_kind="DaemonSet"), pod_gone("a", version=2))

    assert state.busy_until == {}


def test_an_ended_pod_does_not_keep_its_node_busy_by_being_deleted() -> None:
    """Use ended when the pod did, not when its object went."""
    state = told(pod("a", on="n1", phase="succeeded", finished_at=T0), pod_gone("a", version=2, at=HOUR))

    assert state.busy_until == {"n1": T0}


def test_the_earliest_deadline_of_a_notice_wins() -> None:
    """Later words about the same notice only bring it forward."""
    state = told(
        notice("n1", reclaim_at=T0 + 3 * MINUTE),
        notice("n1", reclaim_at=T0 + 2 * MINUTE, at=T0 + SECOND),
        notice("n1", reclaim_at=T0 + 9 * MINUTE, at=T0 + 2 * SECOND),
        notice("n1", at=T0 + 3 * SECOND),
    )
    (kept,) = state.notices.values()

    assert (kept.notice.reclaim_at, kept.first_received_at) == (T0 + 2 * MINUTE, T0)


def test_a_withdrawn_notice_stands_again_when_it_is_said_again() -> None:
    """A repeat of the old word changes nothing; a new word does, with its own deadline."""
    withdrawn = SpotNoticeWithdrawn(
        provider_id=provider_id("buy-n1"), kind="terminate", provider_event="1", withdrawn_at=T0 + MINUTE
    )
    old = notice("n1", reclaim_at=T0 + 2 * MINUTE)
    back = told(old, (Told(withdrawn, T0 + MINUTE),), old)
    again = told(notice("n1", reclaim_at=T0 + HOUR, at=T0 + 5 * MINUTE), into=back)

    assert [each.is_active for each in back.notices.values()] == [False]
    assert [(each.is_active, each.notice.reclaim_at) for each in again.notices.values()] == [(True, T0 + HOUR)]


def test_a_withdrawal_takes_back_only_what_came_before_it() -> None:
    """A repeat of an old withdrawal leaves a newer notice standing."""
    withdrawn = SpotNoticeWithdrawn(
        provider_id=provider_id("buy-n1"), kind="terminate", provider_event="1", withdrawn_at=T0
    )
    state = told(notice("n1", at=T0 + MINUTE), (Told(withdrawn, T0 + HOUR),))

    assert [each.is_active for each in state.notices.values()] == [True]


def test_a_request_without_an_id_is_known_by_its_event() -> None:
    """The scheduler and the state derive the same id from the same event."""
    recorded = record([Told(request(None), T0)])
    state = fold(EMPTY_STATE, recorded)

    assert set(state.jobs) == {job_id_of(None, recorded[0].envelope.id)}


def test_the_first_request_of_an_id_is_the_job() -> None:
    """A second request under the same id is somebody else's business: it is answered, not folded in."""
    state = told(job("train")[:1], (Told(request("train", job_name="other"), T0 + MINUTE),))
    requested = state.jobs[JobId("train")].requested

    assert isinstance(requested, JobRequested)
    assert requested.job_name == "train"


def test_what_has_ended_is_forgotten_after_its_life() -> None:
    """Finished jobs, refused orders, gone pods and instances go; what still counts stays, however old."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    late = T0 + LIFE
    state = told(
        job("done"),
        (Told(finished, T0),),
        job("waits"),
        bought(purchase("buy-refused"), is_refused=True),
        bought(purchase("buy-open")),
        instance(purchase("buy-ended"), state="terminated"),
        pod("a"),
        pod_gone("a", version=2, at=timedelta(0)),
        notice("n1", reclaim_at=T0 + MINUTE),
    )
    after = told(
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


def test_where_a_batch_ends_makes_no_difference_to_what_is_forgotten() -> None:
    """A word about a notice long forgotten is a new notice, whether or not the old one was folded just before."""
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


def test_a_stream_that_is_ahead_does_not_age_another() -> None:
    """While a service catches up, one stream may be days ahead; a job that just ended there is not old yet."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    state = told(pod("b", at=T0 + 10 * LIFE), job("done"), (Told(finished, T0),))

    assert set(state.jobs) == {"done"}


def test_a_date_in_the_far_future_from_outside_empties_nothing() -> None:
    """Anybody may publish a request with any date; only our own facts move the stream's time."""
    finished = JobFinished(job_id=JobId("done"), outcome="completed", finished_at=T0)
    future = (Told(request("odd"), T0 + 1000 * LIFE),)
    state = told(job("done"), (Told(finished, T0),), future)

    assert set(state.jobs) == {"done", "odd"}


def test_instances_that_no_list_shows_any_more_are_forgotten() -> None:
    """Missing from the cloud's lists for a tombstone's life: there is nothing left to know."""
    listed = NodeInstanceListed(provider_ids=(), listed_at=T0 + LIFE)
    state = told(bought(purchase("buy-a")), (Told(listed, T0 + LIFE),))

    assert (state.instances, state.instances_seen_at) == ({}, {})


def test_the_last_plan_is_the_one_of_the_highest_sequence() -> None:
    """The fence of the next plan; a repeat of an older plan does not move it back."""
    recorded = record([*bought(purchase("buy-a")), *bought(purchase("buy-b", at=T0 + MINUTE), at=T0 + MINUTE)])
    state = fold(fold(EMPTY_STATE, recorded), recorded[:1])

    assert (state.last_plan_sequence, state.last_plan_at) == (4, T0 + MINUTE)


def test_a_state_survives_being_stored() -> None:
    """Every part of the state decodes to what it was: snapshots stand on this."""
    state = given(node("n1"), pod("a", on="n1"), job("train", placed_on=("n1",)), notice("n1"), bought(purchase("b")))

    assert msgspec.json.decode(msgspec.json.encode(state), type=ClusterState) == state
    assert isinstance(next(iter(state.pods.values())), PodObserved)
