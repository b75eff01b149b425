"""Which losses of a job use up a retry: interruptions and faults do, losses by our own choice never do."""

from datetime import datetime, timedelta

import pytest
from tests.support.purchases import drained, evicted, notice
from tests.support.stories import MINUTE, T0, Story, TimedFact, given, job, node, offer, policy

from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.node import NodeGone
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.model.directives import Attribution
from gpu_autoscaler.model.ids import JobId, NodeUid, PodUid
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons import drain
from gpu_autoscaler_services.scheduler.attempts import losses

TRAIN = JobId("train")
SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
BY_ADA = Attribution(key="max", by="ada", why="maintenance", until=T0)
OWN_CHOICES = (
    drain.NodeIdle(idle_seconds=600.0, idle_seconds_max=600.0),
    drain.NodeUnderused(pods=(PodUid("uid-train-1"),), saving_micro_usd_per_hour=1),
    drain.NodeExpired(age_seconds=2.0, age_seconds_max=1.0),
    drain.NodeDrifted(difference="pool gpu no longer exists"),
    drain.RebalanceRecommended(noticed_at=T0),
    drain.GangAbandoned(gang="job/other", defer_reason="nodes_limit"),
    drain.AboveOverride(attribution=BY_ADA, unit="node", count=2, count_max=1),
    drain.SpendExhausted(owner="cluster", period="day", spent_micro_usd=2, limit_micro_usd=1, until=T0),
)
NOT_OURS = (
    drain.SpotReclaim(notice_id="n", kind="terminate", reclaim_at=None),
    drain.NodeDeleted(deleted_at=T0),
    drain.NodeUnhealthy(evidence="GPU 3 reported XID 79", unhealthy_seconds=2.0, unhealthy_seconds_max=1.0),
    drain.BootTimedOut(booting_seconds=2.0, boot_seconds_max=1.0),
)


def test_every_reason_of_a_drain_is_tried() -> None:
    """A new reason has to be put in one of the two lists."""
    assert {type(reason) for reason in (*OWN_CHOICES, *NOT_OURS)} == set(drain.DrainReason.__args__)


def gone(number: int, at: datetime) -> Story:
    """The member on this node is deleted."""
    fact = PodGone(
        epoch=1,
        version=number,
        pod_uid=PodUid(f"uid-train-{number}"),
        namespace="default",
        name=f"train-{number}",
        node_name=f"n{number}",
        job_id=TRAIN,
        phase="running",
    )
    return (TimedFact(fact, at),)


class Course:
    """A job that is placed, lost and placed again, with the facts that the scheduler publishes."""

    def __init__(self, retries_count_max: int = 3) -> None:
        self.policy = policy(job_retries_count_max=retries_count_max)
        self.now = T0
        self._stories: list[Story] = [job("train", at=T0)]
        self._count = 0

    @property
    def state(self) -> ClusterState:
        """What the facts so far say."""
        return given(*self._stories, as_of=self.now)

    def place(self, of: Offer = ON_DEMAND) -> JobPlaced:
        """Place the job on a new node of this offer."""
        placed = self.place_if_possible(of)
        assert placed is not None
        return placed

    def place_if_possible(self, of: Offer) -> JobPlaced | None:
        """Add a node of this offer; place the job if it may run there."""
        self._count += 1
        self.now += MINUTE
        self._stories.append(node(f"n{self._count}", of=of, at=self.now))
        placements = schedule(self.state, self.policy, self.now).placements
        if not placements:
            return None
        (placement,) = placements
        placed = JobPlaced(
            job_id=TRAIN,
            attempt=placement.attempt,
            node_uids=placement.node_uids,
            node_names=placement.node_names,
            placed_at=self.now,
            retries_used_count=placement.retries_used_count,
        )
        self._tell(placed)
        return placed

    def disrupt(self, reason: drain.DrainReason | None, *, evicts: bool = True) -> None:
        """Drain the job's node for this reason, if any; the drain evicts its pod."""
        self.now += 10 * MINUTE
        name = f"n{self._count}"
        if reason is not None:
            self._stories.append(drained(name, reason=reason, at=self.now))
            if evicts:
                self._stories.append(evicted(f"train-{self._count}", off=name, at=self.now + MINUTE))
        self.now += 2 * MINUTE

    def lose(self, reason: drain.DrainReason | None = None, *, evicts: bool = True) -> list[Fact]:
        """Return what follows from the loss of the member."""
        self.disrupt(reason, evicts=evicts)
        name = f"n{self._count}"
        ended = NodeGone(epoch=1, version=1, node_uid=NodeUid(f"uid-{name}"), name=name)
        self.add(gone(self._count, self.now), (TimedFact(ended, self.now),))
        self.now += MINUTE
        facts = [fact for of_job in losses(self.state, self.policy, self.now).values() for fact in of_job]
        for fact in facts:
            self._tell(fact)
        return facts

    def add(self, *stories: Story) -> None:
        """Add what else happened."""
        self._stories += stories

    def _tell(self, fact: Fact) -> None:
        self._stories.append((TimedFact(fact, self.now),))


@pytest.mark.parametrize("reason", OWN_CHOICES, ids=lambda reason: reason.tag())
def test_a_loss_by_our_own_choice_never_uses_up_a_retry(reason: drain.DrainReason) -> None:
    """Moved more often than it has retries, the job goes on; then it still has all of them."""
    course = Course(retries_count_max=2)
    for attempt in range(1, 7):
        placed = course.place()
        assert (placed.attempt, placed.retries_used_count) == (attempt, 0)
        (lost,) = course.lose(reason)
        assert isinstance(lost, JobPreempted)
        assert (lost.attempt, lost.is_own_choice, lost.retries_used_count) == (attempt, True, 0)
    for used_count in (1, 2):
        course.place()
        (lost,) = course.lose()
        assert isinstance(lost, JobPreempted)
        assert (lost.is_own_choice, lost.retries_used_count) == (False, used_count)
    course.place()
    _, end = course.lose()
    assert isinstance(end, JobFinished)
    assert end.message == (
        "lost 3 attempts, job_retries_count_max is 2; last: pod default/train-9 on node n9 was lost; "
        "6 more by our own choice used up no retry"
    )


@pytest.mark.parametrize("reason", [*NOT_OURS, None], ids=lambda reason: "none" if reason is None else reason.tag())
def test_interruptions_faults_and_unknown_causes_use_up_a_retry(reason: drain.DrainReason | None) -> None:
    """The cloud's, the hardware's or somebody else's choice."""
    course = Course(retries_count_max=1)
    course.place()
    (lost,) = course.lose(reason)
    assert isinstance(lost, JobPreempted)
    assert (lost.is_own_choice, lost.retries_used_count) == (False, 1)
    assert course.place().retries_used_count == 1
    assert [type(fact) for fact in course.lose(reason)] == [JobPreempted, JobFinished]


def test_after_the_third_interruption_a_job_runs_on_demand() -> None:
    """A free spot node is no place for it then; moves before and between count for nothing."""
    reclaim, drift = NOT_OURS[0], OWN_CHOICES[3]
    course = Course()
    for reason in (drift, reclaim, drift, reclaim, drift, reclaim):
        course.place(SPOT)
        assert [type(fact) for fact in course.lose(reason)] == [JobPreempted]
    assert course.place_if_possible(SPOT) is None
    placed = course.place()
    assert (placed.attempt, placed.retries_used_count, placed.node_names) == (7, 3, ("n8",))
    assert [type(fact) for fact in course.lose(drift)] == [JobPreempted]
    course.place()
    assert [type(fact) for fact in course.lose(reclaim)] == [JobPreempted, JobFinished]


def test_the_drain_that_evicted_the_pod_decides() -> None:
    """A notice that came after our eviction changes nothing; one that evicted the pod itself does."""
    reclaim, drift = NOT_OURS[0], OWN_CHOICES[3]
    for evictor, is_own_choice in (("ours", True), ("cloud", False)):
        course = Course()
        course.place()
        course.add(
            drained("n1", reason=drift, at=course.now),
            drained("n1", reason=reclaim, action_id="drain-cloud", is_voluntary=False, at=course.now + MINUTE),
            notice("n1", at=course.now + MINUTE),
        )
        story = evicted("train-1", off="n1" if evictor == "ours" else "cloud", at=course.now + MINUTE)
        course.add(story)
        (lost,) = course.lose()
        assert isinstance(lost, JobPreempted)
        assert lost.is_own_choice is is_own_choice


def test_a_drain_counts_before_its_eviction_is_known() -> None:
    """Streams are not ordered: the pod's end may be read before its eviction. A canceled drain evicts nothing."""
    course = Course()
    course.place()
    (lost,) = course.lose(OWN_CHOICES[3], evicts=False)
    assert isinstance(lost, JobPreempted)
    assert lost.is_own_choice
    course.place()
    course.add(drained("n2", reason=OWN_CHOICES[3], at=course.now, cancelled_at=course.now + MINUTE))
    (lost,) = course.lose()
    assert isinstance(lost, JobPreempted)
    assert not lost.is_own_choice


def test_a_drain_of_an_earlier_node_of_the_same_name_says_nothing() -> None:
    """Names of nodes are used again."""
    course = Course()
    course.place()
    course.add(drained("n1", reason=OWN_CHOICES[3], at=T0))
    (lost,) = course.lose()
    assert isinstance(lost, JobPreempted)
    assert not lost.is_own_choice


def test_a_drain_that_is_known_late_gives_the_retry_back() -> None:
    """Plan and eviction reach the scheduler after the loss: the next attempt has the retry again."""
    course = Course()
    course.place()
    lost_at = course.now + 10 * MINUTE
    (lost,) = course.lose()
    assert isinstance(lost, JobPreempted)
    assert lost.retries_used_count == 1
    course.add(drained("n1", reason=OWN_CHOICES[3], at=lost_at), evicted("train-1", off="n1", at=lost_at + MINUTE))
    assert course.place().retries_used_count == 0


def test_the_last_loss_of_unknown_cause_waits_for_its_drain() -> None:
    """The end of a job cannot be taken back: for 30 s the scheduler waits for a plan that explains the loss."""
    course = Course(retries_count_max=0)
    course.place()
    placed_at = course.now
    course.add(gone(1, placed_at + 10 * MINUTE))
    at = placed_at + 10 * MINUTE
    assert losses(course.state, course.policy, at + timedelta(seconds=29)) == {}
    assert [type(fact) for fact in losses(course.state, course.policy, at + timedelta(seconds=30))[TRAIN]] == [
        JobPreempted,
        JobFinished,
    ]
    course.add(drained("n1", reason=OWN_CHOICES[3], at=placed_at + 5 * MINUTE))
    assert [type(fact) for fact in losses(course.state, course.policy, at)[TRAIN]] == [JobPreempted]


def test_losses_of_an_earlier_release_each_used_a_retry() -> None:
    """Its facts say nothing of choices."""
    placed = JobPlaced(job_id=TRAIN, attempt=3, node_uids=(), node_names=("n1",), placed_at=T0)
    lost = JobPreempted(job_id=TRAIN, attempt=3, cause="lost", preempted_at=T0)
    assert (placed.retries_used, lost.retries_used) == (2, 3)
