"""Teams: projects with queues, quotas and namespaces, and users who send pod templates. For runs with `has_teams`,
which `make sim` draws for a share of its seeds.

The strings that seed `Random` are part of each seed's meaning.
"""

import random
from typing import Any

from msgspec.structs import replace

from gpu_autoscaler.core.policy.limit_settings import SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.policy.quota_settings import ProjectQuota, QuotaLimits, QuotasPolicy
from gpu_autoscaler.core.policy.tenancy_settings import TenancyPolicy
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.jobs import ContainerRequest
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.simcluster.offers import ZONES

TEAMS = ("vision", "speech", "ranking")
USERS = ("ann", "bob", "carl", "")
TEAMS_RATIO = 0.3  # of seeds
TEMPLATES_RATIO = 0.3  # of jobs
RESERVE_SECONDS = 1800.0

_QUEUES: tuple[tuple[QueuePolicy, ...], ...] = (
    (),
    (QueuePolicy(name="all", scheduling_policy="fair-share", reserve_after_seconds=RESERVE_SECONDS),),
    (
        QueuePolicy(name="ordered", projects=("ranking",), scheduling_policy="fcfs-strict"),
        QueuePolicy(name="rest", aging_hourly_priority=200.0, reserve_after_seconds=RESERVE_SECONDS),
    ),
    (
        QueuePolicy(name="fair", projects=("vision", "speech"), scheduling_policy="fair-share"),
        QueuePolicy(name="rest", scheduling_policy="fcfs-best-effort", reserve_after_seconds=RESERVE_SECONDS),
    ),
)
# Of the three projects. The largest gang of the users has twelve GPUs, and some are refused.
_PROJECTS: tuple[tuple[ProjectQuota, ...], ...] = (
    tuple(ProjectQuota(name=name, nominal_gpu_count=4) for name in TEAMS),
    (
        ProjectQuota(name="vision", nominal_gpu_count=2, borrowing_gpu_count_max=6),
        ProjectQuota(name="speech", nominal_gpu_count=8, lending_gpu_count_max=4),
        ProjectQuota(name="ranking", gpu_count_max=6),
    ),
)


def draws_teams(seed: int) -> bool:
    """Return whether the world of this seed has teams. A generator of its own: everything else of a seed stays."""
    return random.Random(f"{seed}/has teams").random() < TEAMS_RATIO


def with_teams(policy: ScalingPolicy, seed: int) -> ScalingPolicy:
    """Return the policy with queues, quotas and namespaces. Without spend limits, as jobs then wait for hours."""
    rng = random.Random(f"{seed}/teams")
    quotas = QuotasPolicy(
        strategy=rng.choice(("dynamic", "dynamic", "hybrid", "static")),
        is_priority_preemption_on=rng.random() < 1 / 3,
        checkpoint_seconds_max=rng.choice((30.0, 120.0)),
        user_default=QuotaLimits(gpu_count_max=rng.choice((None, 10))),
        projects=rng.choice(_PROJECTS),
    )
    return replace(
        policy,
        queues=rng.choice(_QUEUES),
        quotas=rng.choice((quotas, quotas, QuotasPolicy())),
        tenancy=_tenancy(rng),
        limits=replace(policy.limits, spend=SpendPolicy()),
    )


def _tenancy(rng: random.Random) -> TenancyPolicy:
    quota = {f"requests.{GPU_RESOURCE}": str(rng.choice((4, 8))), "pods": "6"}
    return rng.choice((TenancyPolicy(), TenancyPolicy(namespace_template="gpu-{project}", quota=quota)))


def of_team(request: JobRequested) -> JobRequested:
    """Return the request as a member of a team sends it: with a name, and sometimes with a pod template."""
    rng = random.Random(f"{request.job_id}/{request.run_seconds}/team")
    request = replace(request, submitted_by=rng.choice(USERS))
    if rng.random() >= TEMPLATES_RATIO or request.runtime != "job":
        return request
    return replace(request, container=ContainerRequest(image=""), pod_template=_template(rng))


def _template(rng: random.Random) -> dict[str, Any]:
    """Return a pod template whose init container needs more than its containers, or that is bound to a zone."""
    spec: dict[str, Any] = {
        "containers": [_container("main", "2"), _container("logs", "250m")],
        "initContainers": [_container("fetch", rng.choice(("1", "6")))],
    }
    if rng.random() < 0.5:
        spec["nodeSelector"] = {"topology.kubernetes.io/zone": rng.choice(ZONES)}
    return {"metadata": {"labels": {"team": "yes"}}, "spec": spec}


def _container(name: str, cpu: str) -> dict[str, Any]:
    return {"name": name, "image": f"{name}:1", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}
