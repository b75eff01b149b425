"""Idle workloads of opted-in namespaces: announced, then ended after the grace, only if it is certain."""

from datetime import datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, node, pod, policy
from tests.support.telemetry import minutes
from tests.unit.core.disruption.test_idle_jobs import HELD as HELD_BY_JOB
from tests.unit.core.disruption.test_idle_jobs import ON as JOBS_ON
from tests.unit.core.disruption.test_idle_jobs import holder

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import IdleJobsPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnnounceIdleWorkload, Cut, EndIdleWorkload, Plan, Upkeep
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.model.labels import DO_NOT_DISRUPT, IDLE_ALLOWED, IDLE_ANNOUNCED_AT, IDLE_ENDS_AT, JOBSET_NAME

NOW = T0 + HOUR
ON = policy(idle_jobs=IdleJobsPolicy(namespaces=("default",)))
WORKS = {number: {"utilization_ratio_mean": 0.9, "utilization_ratio_max": 0.9} for number in range(4, 8)}
HELD = {0: "default/a", 1: "default/a", 2: "default/b", 3: "default/b"}


def announced(at: datetime) -> dict[str, str]:
    """Return the annotations of an announcement of this time."""
    return {IDLE_ANNOUNCED_AT: at.isoformat(), IDLE_ENDS_AT: (at + 10 * MINUTE).isoformat()}


def notebooks(*more: Story, owner: tuple[str | None, str] = ("ReplicaSet", "rs-1"), **of_pod: Any) -> ClusterState:  # noqa: ANN401 - of `pod`
    """Two pods of one owner with two GPUs each, idle for an hour."""
    kind, uid = owner
    pods = [pod(name, on="n1", gpus=2, owner_kind=kind, owner_uid=uid or None, **of_pod) for name in ("a", "b")]
    return given(node("n1"), *pods, minutes("n1", 60, busy=0.03, pods=HELD, sick=WORKS), *more, as_of=NOW)


def acts(state: ClusterState, rules: ScalingPolicy = ON, at: datetime = NOW) -> Plan:
    """Return the plan of the state, which the check accepts."""
    made = plan(state, rules, at)
    assert [violation for violation in check(made, state, rules) if violation.action_ids] == []
    return made


def of(made: Plan, kind: type) -> list[Any]:
    """Return the decisions of this kind."""
    return [act for act in made.upkeep_decisions if isinstance(act, kind)]


def test_an_idle_workload_is_announced_first() -> None:
    """All its pods, with the end of the grace; nothing ends in the same plan."""
    made = acts(notebooks())
    (act,) = of(made, AnnounceIdleWorkload)
    assert [known.name for known in act.pods] == ["a", "b"]
    assert (act.announced_at, act.ends_at) == (NOW, NOW + 10 * MINUTE)
    assert of(made, EndIdleWorkload) == []


@pytest.mark.parametrize("kind", ["announce_idle_workload", "announce_idle_job"])
def test_subscribers_of_plans_read_what_is_announced(kind: str) -> None:
    """In the fact that is published, for a workload and for a job of the queue: the pods, the end and the reason."""
    made = acts(notebooks())
    if kind == "announce_idle_job":
        made = acts(holder(minutes("n1", 60, busy=0.03, pods=HELD_BY_JOB, sick=WORKS), annotations={}), JOBS_ON)
    fact = ScalingPlanMade(plan_id=PlanId("p"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    data = msgspec.json.decode(msgspec.json.encode(fact))
    (act,) = [act for act in data["plan"]["upkeep"]["decisions"] if act["decision"] == kind]
    assert (act["namespace"], act["pods"][0]["name"], act["ends_at"]) == ("default", "a", "2026-11-21T13:10:00Z")
    assert act["reason"]["idle_seconds"] == 3600.0


def test_it_ends_after_the_grace_through_its_owner() -> None:
    """Not a second before, and only what was announced since it is idle."""
    state = notebooks(annotations=announced(NOW - 10 * MINUTE))
    (act,) = of(acts(state), EndIdleWorkload)
    assert (act.owner_kind, act.owner_uid, len(act.pods)) == ("ReplicaSet", "rs-1", 2)
    assert of(acts(state, at=NOW - SECOND), EndIdleWorkload) == []
    old = notebooks(annotations=announced(T0 - HOUR))  # it has worked since
    assert (len(of(acts(old), AnnounceIdleWorkload)), of(acts(old), EndIdleWorkload)) == (1, [])


@pytest.mark.parametrize(
    ("of_pod", "rules"),
    [
        ({}, policy()),
        ({}, policy(idle_jobs=IdleJobsPolicy(namespaces=("other",)))),
        ({}, policy(idle_jobs=IdleJobsPolicy(namespaces=("default",)), is_frozen=True)),
        ({"annotations": {IDLE_ALLOWED: "true"}}, ON),
        ({"annotations": {DO_NOT_DISRUPT: "true"}}, ON),
        ({"phase": "pending"}, ON),
        ({"deleting_since": NOW}, ON),
        ({"job_id": "train"}, ON),
        ({"namespace": "kube-system"}, ON),
    ],
    ids=["by default", "another namespace", "frozen", "allowed", "protected", "starts", "ends", "ours", "elsewhere"],
)  # fmt: skip
def test_no_other_workload_is_announced(of_pod: dict[str, Any], rules: ScalingPolicy) -> None:
    """Who wants it opts in; who needs an idle GPU opts out."""
    assert of(acts(notebooks(**of_pod), rules), AnnounceIdleWorkload) == []


def labeled(state: ClusterState, *namespaces: str) -> ClusterState:
    """Return the state in which these namespaces have the label."""
    return replace(state, opted_in_namespaces=namespaces)


@pytest.mark.parametrize(
    ("namespaces", "rules", "count"),
    [(("default",), policy(), 1), (("other",), policy(), 0), (("other",), ON, 1), ((), ON, 1), ((), policy(), 0)],
    ids=["by label", "another namespace", "by policy beside a label", "by policy", "by nothing"],
)
def test_a_namespace_opts_in_by_its_label_or_the_policy(
    namespaces: tuple[str, ...], rules: ScalingPolicy, count: int
) -> None:
    """Each is enough."""
    assert len(of(acts(labeled(notebooks(), *namespaces), rules), AnnounceIdleWorkload)) == count


def test_the_end_needs_the_label_as_well() -> None:
    """It was announced; the label was removed since, and the check refuses an end decided before."""
    without = notebooks(annotations=announced(NOW - 10 * MINUTE))
    made = acts(labeled(without, "default"), policy())
    assert len(of(made, EndIdleWorkload)) == 1
    assert of(acts(without, policy()), EndIdleWorkload) == []
    assert any("did not opt in" in str(violation) for violation in check(made, without, policy()))


def test_one_busy_pod_keeps_its_workload_and_no_other() -> None:
    """A third pod of the owner works; without it the other two would be announced."""
    held = {**HELD, 4: "default/c"}
    busy = (pod("c", on="n1", gpus=1, owner_kind="ReplicaSet", owner_uid="rs-1"),
            minutes("n1", 60, busy=0.03, pods=held, sick=WORKS))  # fmt: skip
    assert of(acts(notebooks(*busy)), AnnounceIdleWorkload) == []


def test_pods_of_a_jobset_are_one_workload() -> None:
    """Whatever Job owns them: they end together, through the JobSet."""
    jobs = [
        pod(name, on="n1", gpus=2, owner_kind="Job", owner_uid=f"job-{name}", labels={JOBSET_NAME: "train"})
        for name in ("a", "b")
    ]
    state = given(node("n1"), *jobs, minutes("n1", 60, busy=0.03, pods=HELD, sick=WORKS), as_of=NOW)
    (act,) = of(acts(state), AnnounceIdleWorkload)
    assert len(act.pods) == 2


def test_an_owner_of_another_kind_is_deferred_with_the_reason() -> None:
    """It would create its pods again."""
    made = acts(notebooks(owner=("RayCluster", "ray-1")))
    assert of(made, AnnounceIdleWorkload) == []
    (held,) = [act for act in made.upkeep_deferred if act.decision == "announce_idle_workload"]
    assert held.reason.tag() == "owner_unsupported"


def test_a_pod_without_an_owner_ends_alone() -> None:
    """By its own idle time."""
    made = acts(notebooks(owner=(None, ""), annotations=announced(NOW - 10 * MINUTE)))
    assert [(act.owner_kind, len(act.pods)) for act in of(made, EndIdleWorkload)] == [(None, 1), (None, 1)]


def test_the_check_reads_each_condition_of_an_end_again() -> None:
    """The namespace, the pods, their owner, telemetry and the announcement."""
    annotations = announced(NOW - 10 * MINUTE)
    state = notebooks(annotations=annotations)
    made = acts(state)
    (act,) = of(made, EndIdleWorkload)

    def is_refused(wrong: EndIdleWorkload, of_state: ClusterState = state, rules: ScalingPolicy = ON) -> bool:
        changed = replace(made, upkeep=Upkeep(decisions=(wrong,)))
        return any(wrong.action_id in violation.action_ids for violation in check(changed, of_state, rules))

    assert not is_refused(act)
    assert is_refused(act, rules=policy())
    assert is_refused(replace(act, pods=act.pods[:1]))
    assert is_refused(replace(act, owner_kind="StatefulSet"))
    assert is_refused(replace(act, owner_uid="rs-2"))
    assert is_refused(act, notebooks())
    assert is_refused(act, notebooks(annotations=announced(NOW - 9 * MINUTE)))
    assert is_refused(act, notebooks(annotations=announced(T0 - MINUTE)))
    assert is_refused(act, notebooks(annotations={**annotations, IDLE_ALLOWED: "true"}))
    assert is_refused(act, replace(state, telemetry_history={}))
