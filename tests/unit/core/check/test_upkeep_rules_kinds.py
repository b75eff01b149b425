"""The plan check on each kind of act: it accepts what the state justifies, and refuses each wrong variant of it."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.braked_fleet import with_finalizer
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    bought,
    given,
    job,
    node,
    offer,
    pod,
    policy,
    provider_id,
    purchase,
)
from tests.support.telemetry import minutes
from tests.unit.core.disruption.test_periodic_checkpoints import interrupted, saved

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import CheckpointsPolicy, IdleJobsPolicy, RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import AnnounceIdleJob, AnyUpkeep, RequestJobCheckpoint, Upkeep
from gpu_autoscaler.model.ids import JobId, NodeUid, ProviderId
from gpu_autoscaler.model.labels import (
    CHECKPOINT_REQUESTED,
    DO_NOT_DISRUPT,
    IDLE_ANNOUNCED_AT,
    IDLE_ENDS_AT,
    KARPENTER_REGISTERED,
)
from gpu_autoscaler.model.scheduling import Taint

NOW = T0 + HOUR
KARPENTERS = {KARPENTER_REGISTERED: "true"}
UNREGISTERED = Taint("karpenter.sh/unregistered", "NoExecute")
NO_FINALIZERS = policy(removal=RemovalPolicy(is_finalizer_on=False))
IDLE = policy(idle_jobs=IdleJobsPolicy(is_on=True))
GONE = NOW - 30 * MINUTE

Change = Callable[[ClusterState], ClusterState]


def act_of(kind: str, state: ClusterState, rules: ScalingPolicy, at: datetime) -> AnyUpkeep:
    """Return the only act of the kind that the plan of this state decides; the check accepts it."""
    made = plan(state, rules, at)
    (act,) = [act for act in made.upkeep_decisions if act.tag() == kind]
    assert not is_refused(act, state, rules, at)
    return act


def is_refused(act: AnyUpkeep, state: ClusterState, rules: ScalingPolicy, at: datetime = NOW) -> bool:
    """True if the check refuses this act in the plan of this state, in place of the plan's own."""
    made = replace(plan(state, rules, at), upkeep=Upkeep(decisions=(act,)))
    return any(act.action_id in violation.action_ids for violation in check(made, state, rules))


def of_nodes(**changes: Any) -> Change:  # noqa: ANN401 - fields of NodeObserved
    """Each node was observed with these changes."""
    return lambda state: replace(state, nodes={uid: replace(seen, **changes) for uid, seen in state.nodes.items()})


def of_pods(**changes: Any) -> Change:  # noqa: ANN401 - fields of PodObserved
    """Each pod was observed with these changes."""
    return lambda state: replace(state, pods={uid: replace(seen, **changes) for uid, seen in state.pods.items()})


def without(*fields: str) -> Change:
    """These tables of the state are empty."""
    return lambda state: replace(state, **{field: {} for field in fields})


FOREIGN: Change = lambda state: of_nodes(action_id=None)(without("instances", "orders", "drains")(state))  # noqa: E731


# ---- finalizers


@pytest.mark.parametrize(
    "change",
    [
        of_nodes(has_finalizer=True),
        of_nodes(deleting_since=NOW),
        of_nodes(labels=tuple(KARPENTERS.items())),
        of_nodes(taints=(UNREGISTERED,)),
        FOREIGN,
        without("nodes"),
    ],
    ids=["has it", "being deleted", "Karpenter's", "Karpenter's, new", "not ours", "unknown"],
)
def test_a_finalizer_is_added_only_where_it_is_missing(change: Change) -> None:
    """To nodes of ours that are there to stay."""
    state = given(node("n1"), as_of=NOW)
    act = act_of("add_finalizer", state, policy(), NOW)
    assert is_refused(act, change(state), policy())


def test_no_finalizer_is_added_to_another_node_or_against_the_policy() -> None:
    """A node of the same name is another one; the policy can do without."""
    state = given(node("n1"), as_of=NOW)
    act = act_of("add_finalizer", state, policy(), NOW)
    assert is_refused(replace(act, node_uid=NodeUid("uid-n2")), state, policy())
    assert is_refused(replace(act, node_name="n2"), state, policy())
    assert is_refused(act, state, NO_FINALIZERS)


def ended(state: ClusterState) -> ClusterState:
    """The instance of n1 has ended."""
    over = {
        known: replace(instance, state="terminated", terminated_at=GONE) for known, instance in state.instances.items()
    }
    return replace(state, instances=over)


def missing(lag: timedelta) -> Change:
    """The instance of n1 is in no list for this long."""
    return lambda state: replace(
        without("instances", "orders", "drains")(state),
        instances_listed_at=NOW, instances_seen_at={provider_id("buy-n1"): NOW - lag},
    )  # fmt: skip


DELETED: Story = with_finalizer(node("n1", deleting_since=T0))


@pytest.mark.parametrize(
    ("story", "rules", "prepare"),
    [
        (DELETED, policy(), ended),
        (DELETED, policy(), missing(11 * MINUTE)),
        (with_finalizer(node("n1", labels=KARPENTERS)), policy(), lambda state: state),
        (with_finalizer(node("n1")), NO_FINALIZERS, lambda state: state),
    ],
    ids=["instance ended", "instance missing", "Karpenter", "policy"],
)
def test_a_finalizer_is_removed_for_each_cause(story: Story, rules: ScalingPolicy, prepare: Change) -> None:
    """And never from a node that lacks it, or that is another one."""
    state = prepare(given(story, as_of=NOW))
    act = act_of("remove_finalizer", state, rules, NOW)
    assert is_refused(act, of_nodes(has_finalizer=False)(state), rules)
    assert is_refused(act, without("nodes")(state), rules)
    assert is_refused(replace(act, node_name="n2"), state, rules)
    assert is_refused(replace(act, node_uid=NodeUid("uid-n2")), state, rules)


@pytest.mark.parametrize(
    "change",
    [lambda state: state, of_nodes(deleting_since=None), missing(9 * MINUTE)],
    ids=["runs", "not deleted", "missing only lately"],
)
def test_a_finalizer_is_kept_while_the_instance_may_run(change: Change) -> None:
    """Without it, pods of a node deleted by hand would be killed."""
    running = given(DELETED, as_of=NOW)
    act = act_of("remove_finalizer", ended(running), policy(), NOW)
    assert is_refused(act, change(running), policy())


# ---- checkpoint requests


@pytest.mark.parametrize(
    "change",
    [
        of_nodes(labels=()),
        of_nodes(deleting_since=None),
        of_nodes(deleting_since=NOW - SECOND),
        FOREIGN,
        without("nodes"),
        without("pods"),
        of_pods(node_name="n2"),
        of_pods(phase="succeeded"),
        of_pods(owner_kind="DaemonSet"),
        of_pods(annotations=((CHECKPOINT_REQUESTED, (T0 + 2 * MINUTE).isoformat()),)),
    ],
    ids=[
        "not Karpenter's", "not deleted", "deleted at another time", "not ours", "unknown node", "no pod",
        "pods elsewhere", "pods ended", "pods of a daemon", "pods were asked",
    ],
)  # fmt: skip
def test_checkpoints_are_requested_only_on_nodes_that_karpenter_deletes(change: Change) -> None:
    """And only of work that was not asked since the deletion."""
    state = given(node("n1", labels=KARPENTERS, deleting_since=T0 + MINUTE), pod("p", on="n1"), as_of=NOW)
    act = act_of("request_checkpoints", state, policy(), NOW)
    assert is_refused(act, change(state), policy())


# ---- periodic checkpoints


SAVING = saved(NOW - 20 * MINUTE)


def finished(state: ClusterState) -> ClusterState:
    """The job has ended, as its record says."""
    return replace(state, jobs={JobId("train"): replace(state.jobs[JobId("train")], queued=None)})


def of_job(**changes: Any) -> Change:  # noqa: ANN401 - fields of JobSpec
    """The job was accepted with these changes."""

    def change(state: ClusterState) -> ClusterState:
        known = state.jobs[JobId("train")]
        assert known.queued is not None
        queued = replace(known.queued, spec=replace(known.queued.spec, **changes))
        return replace(state, jobs={JobId("train"): replace(known, queued=queued)})

    return change


@pytest.mark.parametrize(
    "change",
    [
        of_pods(annotations=()),
        of_pods(annotations=tuple(saved(NOW - 14 * MINUTE).items())),
        of_pods(annotations=tuple(sorted(saved(NOW - 20 * MINUTE, NOW - MINUTE).items()))),
        of_pods(phase="succeeded"),
        of_pods(deleting_since=NOW),
        of_pods(node_name="n2"),
        of_pods(job_id="other"),
        without("pods"),
        without("jobs"),
        finished,
        of_job(checkpoint_interval_seconds=0.0),
        of_job(checkpoint_interval_seconds=1500.0),
        of_job(checkpoint_interval_seconds=300.0),
    ],
    ids=[
        "saves on no request", "saved lately", "was asked", "ended", "is deleted", "pods elsewhere", "pods of another",
        "no pods", "unknown job", "not accepted", "asks for none", "asks for fewer", "another interval",
    ],
)  # fmt: skip
def test_a_job_is_asked_only_when_it_is_due(change: Change) -> None:
    """Each of the planner's conditions is read again."""
    running = job("train", gpus=1, placed_on=("n1",), is_running=True)
    member = pod("a", on="n1", owner_kind="Job", job_id="train", annotations=SAVING)
    state = given(node("n1"), running, member, as_of=NOW)
    act = act_of("request_job_checkpoint", state, policy(), NOW)
    assert is_refused(act, change(state), policy())
    assert is_refused(act, state, policy(checkpoints=CheckpointsPolicy(is_on=False)))
    assert is_refused(act, state, policy(checkpoints=CheckpointsPolicy(interval_seconds=1500.0)))
    assert is_refused(replace(act, node_names=("n2",)), state, policy())
    assert is_refused(replace(act, since=NOW - 30 * MINUTE), state, policy())


def test_a_computed_interval_follows_from_its_figures() -> None:
    """From a save that a pod took, and an interruption that was measured."""
    state = interrupted(4, checkpoint_interval_seconds="auto")
    act = act_of("request_job_checkpoint", state, policy(), NOW)
    assert isinstance(act, RequestJobCheckpoint)
    for changes in ({"interval_seconds": 120.0}, {"save_seconds": 5.0}, {"save_seconds": None}):
        assert is_refused(replace(act, reason=replace(act.reason, **changes)), state, policy())
    assert is_refused(act, replace(state, spot_terminations={}), policy())


# ---- idle jobs


ANNOUNCED = {IDLE_ANNOUNCED_AT: (NOW - 12 * MINUTE).isoformat(), IDLE_ENDS_AT: (NOW - 2 * MINUTE).isoformat()}


def idle_job(*, member_count_min: int | None = None, annotations: dict[str, str] = ANNOUNCED) -> ClusterState:
    """A job of two pods with two GPUs each on n1, all idle for an hour; other GPUs of the node work."""
    works = {number: {"utilization_ratio_mean": 0.9, "utilization_ratio_max": 0.9} for number in range(4, 8)}
    held = {0: "default/a", 1: "default/a", 2: "default/b", 3: "default/b"}
    pods = (
        pod(name, on="n1", gpus=2, owner_kind="Job", job_id="train", annotations=annotations) for name in ("a", "b")
    )
    waiting = job("train", gpus=2, members=2, placed_on=("n1",), is_running=True, member_count_min=member_count_min)
    return given(node("n1"), waiting, *pods, minutes("n1", 60, busy=0.03, pods=held, sick=works), as_of=NOW)


def of_gpus(**changes: Any) -> Change:  # noqa: ANN401 - fields of GpuTelemetryHistory
    """The last of the job's GPUs has another history."""

    def change(state: ClusterState) -> ClusterState:
        uid, history = next(iter(state.telemetry_history.items()))
        gpus = (*history.gpus[:3], replace(history.gpus[3], **changes), *history.gpus[4:])
        return replace(state, telemetry_history={uid: replace(history, gpus=gpus)})

    return change


def of_history(**changes: Any) -> Change:  # noqa: ANN401 - fields of NodeTelemetryHistory
    """The node has another history."""
    return lambda state: replace(
        state, telemetry_history={uid: replace(history, **changes) for uid, history in state.telemetry_history.items()}
    )


def of_last_pod(**changes: Any) -> Change:  # noqa: ANN401 - fields of PodObserved
    """The last pod of the job was observed with these changes."""

    def change(state: ClusterState) -> ClusterState:
        *others, last = state.pods.values()
        return replace(state, pods={seen.pod_uid: seen for seen in (*others, replace(last, **changes))})

    return change


def all_zero(state: ClusterState) -> ClusterState:
    """No sensor of the node reads anything."""
    zero = {
        uid: replace(window, gpus=tuple(replace(gpu, utilization_ratio_max=0.0) for gpu in window.gpus))
        for uid, window in state.telemetry.items()
    }
    return replace(state, telemetry=zero)


def many_silent(state: ClusterState) -> ClusterState:
    """Another node has no telemetry."""
    others = given(node("n1"), node("n2"), as_of=NOW)
    return replace(
        state, nodes={**others.nodes, **state.nodes}, usable={**others.usable, **state.usable},
        orders=others.orders, instances=others.instances,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        of_gpus(utilization=((6, T0),)),
        of_gpus(utilization=((3, NOW - MINUTE),)),
        of_gpus(utilization=()),
        of_gpus(pod=None),
        of_history(seen_until=NOW - 6 * MINUTE),
        of_history(changed_at=T0),
        of_history(busy_ratio=None),
        without("telemetry_history"),
        all_zero,
        many_silent,
        of_nodes(is_ready=False),
        FOREIGN,
        of_last_pod(phase="pending"),
        of_last_pod(node_name=None, phase="pending"),
        of_last_pod(deleting_since=NOW),
        of_last_pod(phase="succeeded"),
        of_last_pod(job_id="other"),
        of_last_pod(annotations=(("karpenter.sh/do-not-disrupt", "true"),)),
        of_last_pod(annotations=((DO_NOT_DISRUPT, "true"),)),
        without("pods"),
        without("jobs"),
        finished,
    ],
    ids=[
        "one GPU works", "not idle for long", "figures unknown", "held by nobody", "old", "unchanged", "impossible",
        "no telemetry", "all sensors read zero", "most nodes are silent", "node not ready", "not ours", "a pod starts",
        "a pod waits", "a pod is deleted", "a pod has ended", "a pod is missing", "protected", "protected by ours",
        "no pods", "unknown job", "not accepted",
    ],
)  # fmt: skip
def test_only_jobs_that_are_idle_for_certain_are_canceled(change: Change) -> None:
    """Each of the planner's conditions is read again."""
    state = idle_job()
    act = act_of("cancel_idle_job", state, IDLE, NOW)
    assert is_refused(act, change(state), IDLE)


def test_idle_jobs_are_kept_as_the_policy_says() -> None:
    """It is off, or frozen, or its limit is not reached."""
    state = idle_job()
    act = act_of("cancel_idle_job", state, IDLE, NOW)
    for rules in (
        policy(),
        policy(idle_jobs=IdleJobsPolicy(is_on=True), is_frozen=True),
        policy(idle_jobs=IdleJobsPolicy(is_on=True, idle_seconds=7200.0)),
        policy(idle_jobs=IdleJobsPolicy(is_on=True, busy_ratio_max=0.01)),
    ):
        assert is_refused(act, state, rules)


def test_an_idle_job_is_canceled_after_its_announcement_alone() -> None:
    """Its grace is over, and each pod was announced."""
    act = act_of("cancel_idle_job", idle_job(), IDLE, NOW)
    for annotations in ({}, ANNOUNCED | {IDLE_ENDS_AT: (NOW + SECOND).isoformat()}):
        assert is_refused(act, idle_job(annotations=annotations), IDLE)
    assert is_refused(act, of_last_pod(annotations=())(idle_job()), IDLE)


def test_an_announcement_names_all_pods_and_its_own_end() -> None:
    """Of the job, now, and at the end of the grace."""
    state = idle_job(annotations={})
    act = act_of("announce_idle_job", state, IDLE, NOW)
    assert isinstance(act, AnnounceIdleJob)
    for changes in ({"pods": act.pods[:1]}, {"announced_at": NOW - MINUTE}, {"ends_at": NOW}, {"namespace": "other"}):
        assert is_refused(replace(act, **changes), state, IDLE)
    assert is_refused(act, state, policy())


def test_a_waiting_member_keeps_no_elastic_job() -> None:
    """It can do without, as the planner reads it."""
    waiting = of_last_pod(node_name=None, phase="pending")(idle_job(member_count_min=1))
    act_of("cancel_idle_job", waiting, IDLE, NOW)


# ---- ends of reservations


UNTIL = NOW + 5 * MINUTE


def known(state: ClusterState) -> ClusterState:
    """The notice was received."""
    notice = SpotNoticeReceived(
        provider_id=provider_id("buy-1"), kind="paid_period_over", provider_event=UNTIL.isoformat(), reclaim_at=UNTIL,
        received_at=NOW, channel="calendar",
    )  # fmt: skip
    record = NoticeRecord(notice=notice, first_received_at=NOW, last_received_at=NOW)
    return replace(state, notices={notice.notice_id: record})


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (ended, policy()),
        (without("instances"), policy()),
        (without("orders"), policy()),
        (known, policy()),
        (lambda state: state, policy(reservation_drain_seconds=60.0)),
    ],
    ids=["ended", "unknown", "no reservation", "known", "too early"],
)
def test_the_end_of_a_reservation_is_announced_once_and_in_time(change: Change, rules: ScalingPolicy) -> None:
    """For living instances of ours, by the instant in their order."""
    paid = replace(offer(), paid_from=T0 - HOUR, paid_until=UNTIL)
    state = given(bought(purchase("buy-1", paid)), as_of=NOW)
    act = act_of("announce_reservation_end", state, policy(), NOW)
    assert is_refused(act, change(state), rules)
    assert is_refused(replace(act, reclaim_at=UNTIL + SECOND), state, policy())
    assert is_refused(replace(act, provider_id=ProviderId("another")), state, policy())
