"""A small world with a bill of its own: jobs come at random, machines boot, run and end, charges come late.

It carries out each plan with random delays and knows nothing of limits. What plans are held against is its own bill.
"""

import random
from datetime import datetime, timedelta

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.money import charged, clusters, ledger
from tests.support.purchases import instance, on_sale, provider_id
from tests.support.stories import job, node, pod
from tests.support.timed_facts import EPOCH, T0, Story, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.node import NodeGone, NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodListed
from gpu_autoscaler.events.scaling import ScalingNodeDrained, ScalingNodeTerminated, ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode, Cut, DrainNode, ReleaseInstance
from gpu_autoscaler.model.ids import JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.reasons.drain import SpendExhausted

STEP = timedelta(seconds=55)


class _Machine:
    """An instance, as the cloud knows it."""

    def __init__(self, decision: BuyNode, launched_at: datetime, usable_at: datetime) -> None:
        self.decision = decision
        self.launched_at = launched_at
        self.usable_at = usable_at
        self.is_node = False
        self.ended_at: datetime | None = None
        self.ends_at: datetime | None = None  # told to go: over by then
        self.drain: DrainNode | None = None
        self.charged_until = launched_at
        self.job_id: str | None = None
        self.job_ends_at: datetime | None = None

    @property
    def name(self) -> str:
        return self.decision.action_id.removeprefix("buy-")


class MoneyWorld:
    """Steps of less than a minute, each with a plan of that instant."""

    def __init__(self, seed: int, *, day_usd: float) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._policy = clusters(day=day_usd)
        self._state = EMPTY_STATE
        self._machines: list[_Machine] = []
        self._numbers = 0
        self._version = 1
        self._waiting: dict[str, float] = {}  # job: seconds that it really takes
        self._ledger_lag = timedelta(seconds=self._chance.choice((60, 300, 800)))
        self.now = T0
        self.gone_count = 0  # nodes that went for want of money
        self._tell(ledger(), on_sale())

    @property
    def bill_micro_usd(self) -> int:
        """What the cloud asks for the day."""
        bills = ((one.decision.offer, (one.ended_at or self.now) - one.launched_at) for one in self._machines)
        return sum(cost_micro_usd(offer.price_micro_usd_per_hour or 0, max(time, timedelta())) for offer, time in bills)

    def run(self, *, hours: float) -> None:
        """Go on for so long."""
        for _ in range(round(hours * 3600 / STEP.total_seconds())):
            self.now += STEP
            self._arrive()
            for machine in self._machines:
                if machine.ended_at is None:
                    self._live(machine)
            self._charge()
            self._plan()

    def _tell(self, *stories: Story) -> None:
        told = tuple(each for story in stories for each in story)
        self._state = fold(self._state, record(told))

    def _fact(self, fact: Fact) -> Story:
        return (TimedFact(fact, self.now),)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _arrive(self) -> None:
        if self._chance.random() < 0.02:
            for _ in range(self._chance.choice((1, 1, 4))):
                name, most = f"job-{self._number()}", self._chance.choice((600.0, 1800.0, 3600.0))
                self._waiting[name] = self._chance.uniform(60.0, most)
                priority = self._chance.choice((100, 500, 900))
                self._tell(job(name, at=self.now, duration_seconds_max=most, priority=priority))

    def _live(self, machine: _Machine) -> None:
        """One step of a machine's life: it becomes a node, runs a job, ends it, and terminates on request."""
        if not machine.is_node and self.now >= machine.usable_at and machine.ends_at is None:
            machine.is_node = True
            self._tell(self._as_node(machine))
        if machine.job_ends_at is not None and self.now >= machine.job_ends_at:
            self._end_job(machine, is_done=True)
        if machine.is_node and machine.job_id is None and machine.drain is None and self._waiting:
            self._start_job(machine)
        if machine.ends_at is not None and self.now >= machine.ends_at:
            self._end(machine)

    def _as_node(self, machine: _Machine) -> Story:
        (told,) = node(machine.name, machine.decision.offer, is_ours=False, at=self.now)
        assert isinstance(told.fact, NodeObserved)
        return self._fact(
            msgspec.structs.replace(
                told.fact, action_id=machine.decision.action_id, provider_id=provider_id(machine.decision.action_id)
            )
        )

    def _start_job(self, machine: _Machine) -> None:
        name = self._chance.choice(sorted(self._waiting))
        machine.job_id, machine.job_ends_at = name, self.now + timedelta(seconds=self._waiting.pop(name))
        spec = self._state.jobs[JobId(name)].queued
        assert spec is not None
        placed = job(name, at=self.now, placed_on=(machine.name,), is_running=True, priority=spec.spec.priority,
                     attempt=self._number(), duration_seconds_max=spec.spec.duration_seconds_max)  # fmt: skip
        number = self._number()
        there = pod(f"{name}-pod", on=machine.name, gpus=8, at=self.now, job_id=name, owner_kind="Job", version=number)
        self._tell(placed[2:], there)

    def _end_job(self, machine: _Machine, *, is_done: bool) -> None:
        name = machine.job_id
        assert name is not None
        gone = PodGone(
            epoch=EPOCH, version=self._number() + 10_000, pod_uid=PodUid(f"uid-{name}-pod"),
            namespace="default", name=f"{name}-pod", phase="succeeded",
            node_name=machine.name,
        )  # fmt: skip
        self._tell(self._fact(gone))
        if is_done:
            self._tell(self._fact(JobFinished(job_id=JobId(name), outcome="completed", finished_at=self.now)))
        machine.job_id = machine.job_ends_at = None

    def _end(self, machine: _Machine) -> None:
        if machine.job_id is not None:
            self._end_job(machine, is_done=False)
            # What was evicted is lost here: that it comes back is none of this test's business.
        machine.ended_at = machine.ends_at
        action = machine.drain.action_id if machine.drain is not None else machine.decision.action_id
        if machine.drain is not None:
            drained = ScalingNodeDrained(
                action_id=action, plan_id=PlanId("p"), node_uid=machine.drain.node_uid, node_name=machine.name,
                provider_id=machine.drain.provider_id, drained_at=self.now,
            )  # fmt: skip
            self._tell(self._fact(drained))
        assert machine.ended_at is not None
        over = ScalingNodeTerminated(
            action_id=action, plan_id=PlanId("p"), provider_id=provider_id(machine.decision.action_id),
            order_action_id=machine.decision.action_id, node_name=machine.name, terminated_at=machine.ended_at,
        )  # fmt: skip
        (seen,) = instance(machine.decision, state="terminated", at=machine.launched_at)
        assert isinstance(seen.fact, NodeInstanceObserved)
        self._tell(self._fact(over), self._fact(msgspec.structs.replace(seen.fact, terminated_at=machine.ended_at)))
        if machine.is_node:
            gone = NodeGone(
                epoch=EPOCH, version=self._number() + 10_000, node_uid=NodeUid(f"uid-{machine.name}"), name=machine.name
            )
            self._tell(self._fact(gone))

    def _charge(self) -> None:
        """The tracker charges what is so old, in random order."""
        due = [each for each in self._machines if each.ended_at is None or each.charged_until < each.ended_at]
        self._chance.shuffle(due)
        for machine in due:
            to_at = min(self.now - self._ledger_lag, machine.ended_at or self.now)
            if to_at > machine.charged_until and self._chance.random() < 0.3:
                price = (machine.decision.offer.price_micro_usd_per_hour or 0) / 1_000_000
                (told,) = charged(machine.name, from_at=machine.charged_until, to_at=to_at, usd_per_hour=price)
                span = msgspec.structs.replace(
                    told.fact, provider_id=provider_id(machine.decision.action_id), is_final=to_at == machine.ended_at
                )
                self._tell(self._fact(span))
                machine.charged_until = to_at

    def _plan(self) -> None:
        self._version += 1
        nodes = tuple(NodeUid(f"uid-{each.name}") for each in self._machines if each.is_node and each.ended_at is None)
        pods = tuple(PodUid(f"uid-{each.job_id}-pod") for each in self._machines if each.job_id is not None)
        alive = tuple(provider_id(each.decision.action_id) for each in self._machines if each.ended_at is None)
        self._tell(
            self._fact(NodeListed(epoch=EPOCH, version=100_000 + self._version, node_uids=nodes, listed_at=self.now)),
            self._fact(PodListed(epoch=EPOCH, version=100_000 + self._version, pod_uids=pods, listed_at=self.now)),
            self._fact(NodeInstanceListed(provider_ids=alive, listed_at=self.now)),
        )
        made = accepted_plan(self._state, self._policy, self.now)
        if made.decisions:
            plan_id = PlanId(f"p{self._number()}")
            told = ScalingPlanMade(plan_id=plan_id, plan=made, cut=Cut(), policy_digest="p", core_digest="c")
            sequence = self._state.last_plan_sequence + 1
            (recorded,) = record(self._fact(told))
            self._state = fold(self._state, (msgspec.structs.replace(recorded, sequence=sequence),))
        for decision in made.decisions:
            self._carry_out(decision)

    def _carry_out(self, decision: object) -> None:
        if isinstance(decision, BuyNode):
            launched_at = self.now + timedelta(seconds=self._chance.uniform(0, 60))
            usable_at = launched_at + timedelta(seconds=self._chance.choice((60, 300, 700)))
            machine = _Machine(decision, launched_at, usable_at)
            self._machines.append(machine)
            self._tell(instance(decision, at=launched_at))
        elif isinstance(decision, DrainNode):
            machine = next(each for each in self._machines if f"uid-{each.name}" == decision.node_uid)
            machine.drain = decision
            self.gone_count += isinstance(decision.reason, SpendExhausted)
            patience = (decision.deadline_at - self.now).total_seconds() if machine.job_id is not None else 0.0
            seconds = self._chance.uniform(0, patience) + self._chance.uniform(0, 110)
            machine.ends_at = self.now + timedelta(seconds=seconds)
        elif isinstance(decision, ReleaseInstance):
            machine = next(each for each in self._machines if each.decision.action_id == decision.order_action_id)
            machine.ends_at = self.now + timedelta(seconds=self._chance.uniform(0, 110))
