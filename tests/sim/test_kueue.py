"""Kueue in a simulated world: it asks for capacity before pods exist, and every answer is true."""

import asyncio
import json
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.stories import TimedFact, policy, purchase, record

from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import POD_TEMPLATES, PROVISIONING_REQUESTS
from gpu_autoscaler.kube.wire.provisioning import ProvisioningRequest, ProvisioningRequestStatus, RequestCondition
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, BuyNode, Cut, Plan, Upkeep
from gpu_autoscaler.model.demands import ProvisioningConditionType
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.upkeep import RequestAccepted
from gpu_autoscaler.sim.actors.kueue import Kueue, serve_requests
from gpu_autoscaler.sim.actors.policies import Policies
from gpu_autoscaler.sim.cluster.cloud import Cloud
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.invariants.provisioning_requests import BOOKED, ProvisioningRequestsInvariant
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler_services.simulate import run_one, run_one_differential


def answers_of(path: Path) -> Counter[str]:
    """Return how often each condition and reason was decided."""
    codes: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        if '"answer_provisioning_request"' in line:
            acts = json.loads(line)["data"]["plan"]["upkeep"]["decisions"]
            codes.update(act["code"] for act in acts if act.get("decision") == "answer_provisioning_request")
    return codes


@pytest.mark.parametrize(
    ("seed", "kinds"), [(1, ()), *(pytest.param(seed, None, marks=pytest.mark.sweep) for seed in (2, 4))]
)
def test_requests_are_answered_and_no_invariant_is_violated(
    seed: int, kinds: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Capacity is bought, booked for ten minutes, and checked for; also under faults."""
    path = tmp_path / "facts.jsonl"
    setting = Setting(seed=seed, hours=0.5, jobs_per_hour=1.0, kinds=kinds, has_kueue=True, record_path=str(path))
    assert run_one(setting).violations == ()
    answers = set(answers_of(path))
    assert {"Accepted", "CapacityIsOrdered", "CapacityIsProvisioned"} <= answers
    assert kinds is None or "CapacityReservationTimeExpired" in answers


@pytest.mark.sweep
def test_skipped_ticks_change_no_answer() -> None:
    """What a plan answers depends on inputs alone that are compared."""
    setting = Setting(seed=1, hours=0.5, jobs_per_hour=1.0, kinds=(), has_kueue=True)
    assert run_one_differential(setting).violations == ()


class World:
    """A calm world ten minutes after its start with the requests of that time, no node, and the monitor's rule."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.cluster = Kubernetes(self.loop.now)
        serve_requests(self.cluster)
        workloads = Workloads(self.cluster, self.loop, random.Random(1))  # noqa: S311 - start times, not secrets
        self.invariant = ProvisioningRequestsInvariant(
            workloads,
            Cloud(workloads, random.Random(2)),  # noqa: S311 - as above
            Policies(policy(), when_changed=lambda: None),
            lambda _, what: self.violations.append(what),
            disturbed_until=lambda: 0.0,
        )
        self.kueue = Kueue(self.loop, workloads, random.Random(3))  # noqa: S311 - as above
        self.kueue.begin()
        self.run(600.0)
        self.violations.clear()  # nobody has answered

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()

    def request(self, class_name: str) -> ProvisioningRequest:
        """Return the first request of this class."""
        requests = self.cluster.all(PROVISIONING_REQUESTS)
        return next(found for found in requests if found.spec.provisioning_class_name.startswith(class_name))

    def plan(self, *decisions: BuyNode, answers: tuple[AnswerProvisioningRequest, ...] = ()) -> list[str]:
        """Publish a plan; return what is reported."""
        now = self.cluster.now()
        made = Plan(as_of=now, parent_sequence=0, decisions=decisions, upkeep=Upkeep(decisions=answers))
        fact = ScalingPlanMade(plan_id=PlanId("p"), plan=made, cut=Cut(), policy_digest="", core_digest="")
        (recorded,) = record([TimedFact(fact, now)])
        self.invariant.on_fact(recorded)
        return self.violations

    def answer(
        self, request: ProvisioningRequest, condition: ProvisioningConditionType, code: str, *, is_true: bool = True
    ) -> AnswerProvisioningRequest:
        """Return the decision to set this condition."""
        now, metadata = self.cluster.now(), request.metadata
        return AnswerProvisioningRequest(
            action_id=ActionId("a"), retry_at=now, request_uid=metadata.uid, namespace=metadata.namespace,
            name=metadata.name, condition=condition, is_true=is_true, code=code, at=now,
            reason=RequestAccepted(members_count=1),
        )  # fmt: skip

    def write(self, request: ProvisioningRequest, *conditions: RequestCondition) -> None:
        """Set all conditions of a request."""
        self.cluster.put(
            PROVISIONING_REQUESTS, replace(request, status=ProvisioningRequestStatus(conditions=conditions))
        )


def bought_for(request: ProvisioningRequest) -> BuyNode:
    """Return a purchase for the first pod set of the request."""
    key = f"provisioning/{request.metadata.uid}"
    reason = purchase("b").reason
    assert isinstance(reason, UnmetDemand)
    return replace(purchase("b"), gang=key, reason=replace(reason, demand=(f"{key}/0",)))


@pytest.mark.parametrize(
    ("condition", "code", "what"),
    [
        ("Provisioned", "CapacityIsProvisioned", "0 of 1 pods fit on ready nodes"),
        ("BookingExpired", "CapacityReservationTimeExpired", "its capacity is booked since None"),
        ("CapacityRevoked", "NodeLost", "no machine has ended that was bought for it"),
        ("Failed", "Expired", "it is valid until"),
        ("Failed", "FailedToCreatePods", "its templates exist"),
        ("Failed", "CapacityIsNotFound", "it is to be tried again"),
    ],
)
def test_an_answer_that_is_not_true_is_reported(condition: ProvisioningConditionType, code: str, what: str) -> None:
    """Whatever a process believes."""
    world = World()
    request = world.request("best-effort")
    (violation, *_) = world.plan(answers=(world.answer(request, condition, code),))
    assert what in violation


def test_nothing_may_be_bought_for_a_check() -> None:
    """But for the other class."""
    world = World()
    assert world.plan(bought_for(world.request("best-effort"))) == []
    assert "is only checked" in world.plan(bought_for(world.request("check-capacity")))[0]


def test_conditions_are_decided_and_stay() -> None:
    """One that no plan has decided, and one that is gone."""
    world = World()
    request = world.request("best-effort")
    world.plan(answers=(world.answer(request, "Accepted", "Accepted"),))
    world.write(request, RequestCondition(type="Accepted", status="True", reason="Accepted"))
    assert world.violations == []
    world.write(request, RequestCondition(type="Provisioned", status="True", reason="CapacityIsProvisioned"))
    assert "has lost Accepted" in world.violations[0]
    assert "no plan has decided Provisioned=True" in world.violations[1]


def test_an_answer_that_is_due_is_missed() -> None:
    """A booking ends after ten minutes, and nobody has said so."""
    world = World()
    request = world.request("best-effort")
    world.plan(answers=(world.answer(request, "Provisioned", "CapacityIsProvisioned"),))
    booked = RequestCondition(
        type="Provisioned", status="True", reason="CapacityIsProvisioned", last_transition_time=world.cluster.now()
    )
    world.write(request, booked)
    world.violations.clear()
    world.run(BOOKED.total_seconds() + timedelta(minutes=4).total_seconds())
    assert any(f"{request.metadata.name} is not BookingExpired" in what for what in world.violations)


def test_the_pods_come_once_there_is_capacity() -> None:
    """With the annotations that name the request, and their templates; they are deleted with it."""
    world = World()
    request = world.request("best-effort")
    booked = RequestCondition(type="Provisioned", status="True", last_transition_time=world.cluster.now())
    world.write(request, booked)
    world.run(90.0)
    jobs = world.kueue.workloads[request.metadata.uid].jobs
    assert [job.metadata.name for job in jobs] == [pods.pod_template_ref.name for pods in request.spec.pod_sets]
    world.kueue.stop()
    assert not world.cluster.all(PROVISIONING_REQUESTS)
    assert not world.cluster.all(POD_TEMPLATES)
