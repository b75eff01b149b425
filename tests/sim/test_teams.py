"""Several teams in one cluster, with the real services: quotas hold, borrowed quota returns, nobody is lost."""

import sys
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.quota_settings import ProjectQuota, QuotaLimits, QuotasPolicy
from gpu_autoscaler.events.job import JobPreempted, JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted, QuotaReclaimed
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD, CheckpointSettings
from gpu_autoscaler.sim.actors.teams import draws_teams, of_team, with_teams
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.invariants.quotas import QuotasInvariant
from gpu_autoscaler.sim.scoring.ours import score_ours
from gpu_autoscaler.sim.scoring.runner import POLICY
from gpu_autoscaler.sim.scoring.scenario import Arrival, Scenario
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.simcluster.offers import offers_of
from gpu_autoscaler_services import simulate
from gpu_autoscaler_services.simulate import run_one
from gpu_autoscaler_services.simulation import ROLES

TEAMS = ("vision", "speech", "ranking")


def _arrival(number: int, at_seconds: float, **changes: Any) -> Arrival:  # noqa: ANN401 - fields of JobRequested
    name = f"work-{number:03d}"
    request = JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id="vision",
        gpu_requirements=GpuRequirements(gpu_count=1),
        container=ContainerRequest(image="work:1"),
        workload_type=CHECKPOINTING_WORKLOAD,
        max_duration_hours=8.0,
        run_seconds=1200.0,
    )
    return Arrival(at_seconds=at_seconds, request=replace(request, **changes))


def _teams(seed: int) -> tuple[Arrival, ...]:
    """First vision asks for all GPUs of the cohort; then the owners come, with jobs of all sizes and priorities."""
    rng = Random(f"teams/{seed}")  # noqa: S311 - repeatable, no secret
    eager = [_arrival(number, 10.0 + number, run_seconds=2400.0) for number in range(14)]
    mixed = [
        _arrival(
            number,
            rng.uniform(600.0, 2400.0),
            project_id=rng.choice(TEAMS),
            submitted_by=rng.choice(("ann", "bob")),
            gpu_requirements=GpuRequirements(gpu_count=rng.choice((1, 1, 2, 4))),
            priority=rng.choice(("low", "medium", "high")),
            preemptible=rng.random() < 0.8,
            run_seconds=round(rng.uniform(300.0, 900.0), 1),
        )
        for number in range(14, 32)
    ]
    return tuple(sorted((*eager, *mixed), key=lambda arrival: arrival.at_seconds))


def _played(
    monkeypatch: pytest.MonkeyPatch, seed: int, arrivals: tuple[Arrival, ...], rules: ScalingPolicy
) -> list[JobPreempted]:
    """The preemptions of a run in which no invariant is violated, no job fails and none is left over."""
    seen: list[JobPreempted] = []
    on_fact = QuotasInvariant.on_fact

    def listen(invariant: QuotasInvariant, fact: object) -> None:
        """Note the preemptions for other jobs."""
        if isinstance(fact, JobPreempted) and fact.preemption is not None:
            seen.append(fact)
        on_fact(invariant, fact)  # type: ignore[arg-type]

    monkeypatch.setattr(QuotasInvariant, "on_fact", listen)
    scenario = Scenario(
        name="teams",
        description="three teams in one cohort",
        hours=1.0,
        seed=seed,
        arrivals=arrivals,
        offers=offers_of(TYPES),
        checkpoints=CheckpointSettings(annotates=True),
    )
    score = score_ours(scenario, ROLES, rules)
    assert score.broken == ()
    assert (score.failed_count, score.unfinished_count) == (0, 0)
    return seen


def _quotas(**settings: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of QuotasPolicy
    projects = tuple(ProjectQuota(name=name, nominal_gpu_count=4) for name in TEAMS)
    return replace(
        POLICY, quotas=QuotasPolicy(projects=projects, user_default=QuotaLimits(gpu_count_max=12), **settings)
    )


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 6))])
def test_borrowed_quota_returns_and_no_quota_is_exceeded(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Owners reclaim from vision; every job of every team completes, and no preemption uses up a retry."""
    ended = _played(monkeypatch, seed, _teams(seed), _quotas())

    assert ended
    assert all(isinstance(fact.preemption, QuotaReclaimed) and fact.retries_used == 0 for fact in ended)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["static", "hybrid"])
def test_each_strategy_keeps_its_quotas(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Static never borrows, so it never preempts."""
    ended = _played(monkeypatch, 1, _teams(1), _quotas(strategy=strategy))

    assert strategy == "hybrid" or ended == []


def test_priority_preempts_at_the_limit_of_gpus_and_not_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room to buy nobody ends for an urgent job; at the limit jobs of low priority do."""
    low = [_arrival(number, 10.0 + number, priority="low", run_seconds=1800.0) for number in range(4)]
    urgent = [_arrival(number, 900.0 + number, priority="high", run_seconds=300.0) for number in range(4, 6)]
    free = replace(POLICY, quotas=QuotasPolicy(is_priority_preemption_on=True))
    limited = replace(free, gpu_count_max=4)

    assert _played(monkeypatch, 3, (*low, *urgent), free) == []
    ended = _played(monkeypatch, 3, (*low, *urgent), limited)
    assert ended
    assert all(isinstance(fact.preemption, PriorityPreempted) for fact in ended)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 3, 4, 9, 109))])
def test_teams_with_queues_quotas_and_namespaces_under_faults(seed: int) -> None:
    """Strict and fair queues, reservations, cohorts, ResourceQuotas that the API server enforces, pod templates: no
    invariant is violated, and every job that was accepted and could ever start comes to its end."""
    result = run_one(Setting(seed=seed, hours=1.0, has_teams=True))

    assert result.violations == ()


def test_a_share_of_the_seeds_of_a_sweep_has_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by the seed, so that `make sim SEED=n` repeats it; `--teams`, `--no-teams` and large worlds decide it."""
    seen: dict[str, list[bool]] = {}

    def listen(settings: Iterable[Setting], *_: object, **__: object) -> None:
        """Note which worlds have teams; run none."""
        seen[" ".join(sys.argv[1:])] = [setting.has_teams for setting in settings]
        raise SystemExit

    monkeypatch.setattr(simulate, "sweep", listen)
    for options in ("", "--teams", "--no-teams", "--large"):
        monkeypatch.setattr(sys, "argv", ["make sim", "--seeds", "200", *options.split()])
        with pytest.raises(SystemExit):
            simulate.main()
    drawn, teams, no_teams, large = seen.values()

    assert 0.2 < sum(drawn) / len(drawn) < 0.4
    assert drawn == [draws_teams(seed) for seed in range(1, 201)]
    assert (all(teams), any(no_teams), any(large)) == (True, False, False)


def test_worlds_of_teams_have_every_policy() -> None:
    """Each kind of queue, quota and namespace occurs among the first seeds, and requests with pod templates."""
    policies = [with_teams(POLICY, seed) for seed in range(1, 21)]

    assert {queue.scheduling_policy for rules in policies for queue in rules.queues} == {
        "fair-share", "fcfs-strict", "fcfs-best-effort", "priority"
    }  # fmt: skip
    assert {rules.quotas.strategy for rules in policies if rules.quotas.is_set} == {"static", "dynamic", "hybrid"}
    assert {rules.tenancy.namespace_template for rules in policies} == {"", "gpu-{project}"}
    requests = [of_team(_arrival(number, 0.0).request) for number in range(40)]
    assert {request.pod_template is None for request in requests} == {True, False}
    assert len({request.submitted_by for request in requests}) > 2
