"""Work that is better not moved now; each node would be removed otherwise, and `why` reports it."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, job, node, offer, on_sale, pod, policy

from gpu_autoscaler.core.disruption.eligibility import gpu_seconds_at_risk
from gpu_autoscaler.core.explain.status import StatusView, node_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import ProtectionPolicy, RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import SavingTooSmall

NOW = T0 + 2 * HOUR
SAVES = {labels.CHECKPOINTED_AT: T0.isoformat()}


def merging(*work: Story, rules: ScalingPolicy | None = None, as_of: datetime = NOW) -> tuple[Plan, str]:
    """The plan for a node with this little work beside one with room, and what `why` says of it."""
    rules = rules or policy()
    state = given(node("n1"), node("n2"), pod("full", on="n2", gpus=6), *work, on_sale(), as_of=as_of)
    made = accepted_plan(state, rules, as_of)
    return made, node_line("n1", StatusView.of(state, rules, as_of, made))


def going(made: Plan) -> list[str]:
    """Names of the nodes that the plan drains."""
    return [each.node_name for each in made.drains]


def training(saved: bool = True, **changes: object) -> tuple[Story, Story]:  # noqa: FBT001, FBT002 - reads as a word
    """Return a job's pod on n1, with or without checkpoint support."""
    told = SAVES if saved else {}
    return (
        job("train", gpus=1, placed_on=("n1",), is_running=True, **changes),  # type: ignore[arg-type]
        pod("a", on="n1", owner_kind="Job", job_id="train", annotations=told),
    )


def test_only_work_with_checkpoints_may_be_moved() -> None:
    """It is requested to save first; other work would start over."""
    made, said = merging(*training(saved=False))

    assert going(merging(*training())[0]) == ["n1"]
    assert going(made) == []
    assert "Pod default/a must not be disrupted: it runs to completion and would start over." in said


@pytest.mark.parametrize(("run", "is_kept"), [(299 * SECOND, True), (300 * SECOND, False)])
def test_a_pod_that_just_began_is_not_moved(run: timedelta, *, is_kept: bool) -> None:
    """Five minutes at least: a moved pod is not moved again at once."""
    made, said = merging(pod("a", on="n1", at=NOW - run))

    assert going(made) == ([] if is_kept else ["n1"])
    assert ("it has run for 4 min 59 s of the protected 5 min" in said) == is_kept


@pytest.mark.parametrize(("ends_in", "is_kept"), [(5, True), (15, True), (16, False), (-5, False)])
def test_work_that_is_nearly_done_is_not_moved(ends_in: int, *, is_kept: bool) -> None:
    """By its annotation; an end long past is ignored."""
    told = {labels.EXPECTED_END: (NOW + ends_in * MINUTE).isoformat()}
    made, said = merging(pod("a", on="n1", annotations=told))

    assert going(made) == ([] if is_kept else ["n1"])
    assert ("which is cheaper than moving it" in said) == is_kept


def test_a_job_near_its_time_limit_is_not_moved() -> None:
    """An invalid end protects nothing."""
    made, said = merging(*training(duration_seconds_max=2 * 3600.0 + 600.0))
    unread = {labels.EXPECTED_END: "soon", **SAVES}

    assert going(made) == []
    assert "it ends by 2026" in said
    assert going(merging(pod("a", on="n1", annotations=unread))[0]) == ["n1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"priority": 1000}, "its job has priority 1000"),
        ({"attempt": 3}, "its job has no retry to spare"),
        ({"attempt": 4, "retries_used": 2}, "its job has no retry to spare"),
        ({"is_preemptible": False}, "its job is not preemptible"),
    ],
)
def test_protected_jobs(changes: dict[str, Any], words: str) -> None:
    """Jobs of high priority, and those with fewer than two retries left."""
    made, said = merging(*training(**changes))

    assert going(made) == []
    assert words in said


@pytest.mark.parametrize(("moved_count", "minutes"), [(0, 5), (1, 10), (3, 40), (8, 1280), (20, 1280)])
def test_each_move_doubles_the_protected_time(moved_count: int, minutes: int) -> None:
    """Moves use up no retry, so something else has to limit them; 256 times the protected time is the most."""
    attempts: dict[str, Any] = {"attempt": moved_count + 1, "retries_used": 0, "duration_seconds_max": 1e6}
    placed = job("train", gpus=1, placed_on=("n1",), is_running=True, **attempts)
    for run, is_kept in ((minutes * MINUTE - SECOND, True), (minutes * MINUTE, False)):
        saved = {labels.CHECKPOINTED_AT: (NOW + 22 * HOUR).isoformat()}
        pod_a = pod("a", on="n1", owner_kind="Job", job_id="train", annotations=saved, at=NOW + 22 * HOUR - run)
        made, said = merging(placed, pod_a, as_of=NOW + 22 * HOUR)
        assert (going(made) == []) == is_kept
        assert ("of the protected" in said) == is_kept


def test_a_job_on_several_nodes_is_not_moved() -> None:
    """All members would lose their work."""
    gang = job("train", gpus=1, members=2, placed_on=("n1", "n2"), is_running=True)
    members = [pod(f"m{on}", on=on, owner_kind="Job", job_id="train", annotations=SAVES) for on in ("n1", "n2")]
    made, said = merging(gang, *members)

    assert going(made) == []
    assert "its job runs on several nodes" in said


def test_protection_can_be_switched_off() -> None:
    """Each setting has a value that protects nothing."""
    rules = policy(
        removal=RemovalPolicy(
            protection=ProtectionPolicy(run_seconds_min=0, ending_soon_seconds=0, job_priority_min=None)
        )
    )
    young = pod("a", on="n1", at=NOW - SECOND, annotations={labels.EXPECTED_END: (NOW + MINUTE).isoformat()})

    assert going(merging(young, rules=rules)[0]) == ["n1"]
    assert going(merging(*training(priority=1000), rules=rules)[0]) == ["n1"]


def test_the_node_with_the_latest_save_is_drained_first() -> None:
    """Of two candidates the one with less work at risk."""
    told = {
        name: {labels.CHECKPOINTED_AT: (NOW - minutes * MINUTE).isoformat()} for name, minutes in (("a", 50), ("b", 1))
    }
    made = plan(
        given(
            node("n1"), node("n2"), node("n3"), pod("full", on="n3", gpus=5), on_sale(),
            pod("a", on="n1", annotations=told["a"]), pod("b", on="n2", annotations=told["b"]), as_of=NOW,
        ),
        policy(),
        NOW,
    )  # fmt: skip

    assert going(made) == ["n2"]


def pods_of(*stories: Story) -> Iterable[PodObserved]:
    """The pods of the stories."""
    return [each.fact for story in stories for each in story if isinstance(each.fact, PodObserved)]


def test_work_at_risk_is_unsaved_work() -> None:
    """Per GPU; without checkpoints at most one interval."""
    saved = {labels.CHECKPOINTED_AT: (NOW - MINUTE).isoformat()}
    never = {labels.CHECKPOINTED_AT: ""}
    stake = [
        gpu_seconds_at_risk(pods_of(each), 900.0, NOW)
        for each in (
            pod("a", on="n1", gpus=4, annotations=saved),
            pod("a", on="n1", gpus=2, annotations=never),
            pod("a", on="n1", gpus=2),
            pod("a", on="n1", gpus=1, at=NOW - 30 * SECOND),
        )
    ]

    assert stake == [240.0, 14400.0, 1800.0, 30.0]


def test_a_move_to_save_cost_includes_the_work_at_risk() -> None:
    """The same saving pays for a move just after a save, and not five hours later."""
    big, small = offer("big", gpus=8, usd_per_hour=10.0), offer("small", gpus=4, usd_per_hour=8.0)
    later = T0 + 10 * HOUR

    def replaced(saved_at: datetime) -> bool:
        told = {labels.CHECKPOINTED_AT: saved_at.isoformat()}
        work = pod("a", on="n1", gpus=4, annotations=told)
        made = plan(given(node("n1", big), work, on_sale(big, small), as_of=later), policy(), later)
        found = [each.reason for each in made.deferred if each.step == "replace_expensive"]
        assert bool(made.decisions) != any(isinstance(each, SavingTooSmall) for each in found)
        return bool(made.decisions)

    assert replaced(later - MINUTE)
    assert not replaced(later - 5 * HOUR)
