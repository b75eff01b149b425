"""The jobs that migrate broker and store: when they run, as whom, and with what."""

from typing import Any

import pytest
from tests.chart.charting import VALUES, Json, of_kind, rendered
from tests.chart.test_rendering import environment

from gpu_autoscaler.runtime.config import Settings, load_settings

BEFORE, AFTER = "gpu-autoscaler-migrate-before", "gpu-autoscaler-migrate"
COMMAND = ["python", "-m", "gpu_autoscaler_services.cli.main", "migrate", "--apply"]


def hooks(job: Json) -> set[str]:
    """Return when Helm runs the object."""
    return set(job["metadata"]["annotations"]["helm.sh/hook"].split(","))


def container_of(job: Json) -> tuple[dict[str, Any], Settings]:
    """Return the container of a job and its settings, which load."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    ours = {key: text for key, text in environment(container).items() if key.startswith("GPU_")}
    return container, load_settings(None, ours)


@pytest.mark.parametrize("values", VALUES)
def test_the_jobs_run_around_each_change_of_the_release(values: str) -> None:
    """Before it what services require, without the broker of a release that has no such user; after it the limits."""
    found = rendered(values)
    jobs = of_kind(found, "Job")
    before, _ = container_of(jobs[BEFORE])
    after, settings = container_of(jobs[AFTER])
    assert before["command"] == [*COMMAND, "--only", "store"]
    assert after["command"] == COMMAND
    has_database = settings.store.url.startswith("postgresql://")
    assert hooks(jobs[BEFORE]) == {"pre-upgrade", "pre-rollback"} | ({"pre-install"} if has_database else set())
    assert hooks(jobs[AFTER]) == {"post-install", "post-upgrade", "post-rollback"}
    assert all(
        url.partition("://")[2].startswith("migrator:") and ".migrator@" in url for url in settings.nats.url.split(",")
    )


@pytest.mark.parametrize("values", VALUES)
def test_the_jobs_have_an_account_of_their_own_without_rights(values: str) -> None:
    """It exists before the first job, has no token and no role; the containers are restricted, and end."""
    found = rendered(values)
    jobs = of_kind(found, "Job")
    account = of_kind(found, "ServiceAccount")[AFTER]
    assert hooks(account) == hooks(jobs[BEFORE]) | hooks(jobs[AFTER])
    assert int(account["metadata"]["annotations"]["helm.sh/hook-weight"]) < 0
    assert AFTER not in {**of_kind(found, "ClusterRoleBinding", "RoleBinding")}
    for name in (BEFORE, AFTER):
        pod = jobs[name]["spec"]["template"]["spec"]
        container, settings = container_of(jobs[name])
        assert (pod["serviceAccountName"], pod["restartPolicy"]) == (AFTER, "Never")
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe"} & set(container)
        has_file = any(volume["name"] == "store" for volume in pod["volumes"])
        assert has_file == settings.store.url.startswith("sqlite://") == ("podAffinity" in pod["affinity"])
        (rule,) = jobs[name]["spec"]["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1]}


# Helm's hooks as phases of Argo CD, which knows no rollback (Argo CD, "Helm", Helm Hooks; read 2026-11-23). Its own
# annotation takes precedence, and so does its wave over Helm's weight.
PHASES = {"pre-install": 0, "pre-upgrade": 0, "PreSync": 0, "Sync": 1, "post-install": 2, "post-upgrade": 2}


def argo_order(item: Json) -> tuple[int, int]:
    """Return phase and wave in which Argo CD first applies the object, in each synchronization."""
    notes = item["metadata"].get("annotations", {})
    hook = notes.get("argocd.argoproj.io/hook", notes.get("helm.sh/hook", "Sync"))
    wave = notes.get("argocd.argoproj.io/sync-wave", notes.get("helm.sh/hook-weight", "0"))
    return min(PHASES[name] for name in hook.split(",") if name in PHASES), int(wave)


@pytest.mark.parametrize("values", VALUES)
def test_argo_cd_creates_the_volume_with_the_job_that_needs_it_first(values: str) -> None:
    """In one wave: the next one waits until the volume is bound, which may need the job's pod. Services come after."""
    found = rendered(values)
    job = of_kind(found, "Job")[BEFORE]
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in job["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    claims = [claim for name, claim in of_kind(found, "PersistentVolumeClaim").items() if name in used]
    assert len(claims) == (values == "simulated")
    assert all(argo_order(claim) == argo_order(job) for claim in claims)
    assert argo_order(of_kind(found, "ServiceAccount")[AFTER]) < argo_order(job)
    workloads = of_kind(found, "Deployment", "DaemonSet", "StatefulSet").values()
    assert all(argo_order(job) < argo_order(workload) for workload in workloads)


def test_a_rollback_to_an_earlier_release_is_prepared_by_a_value() -> None:
    """And a stream is limited to less than it stores only by another."""
    jobs = of_kind(rendered("cluster", "migration.to=0.2", "migration.discardHistory=true"), "Job")
    assert container_of(jobs[AFTER])[0]["command"] == [*COMMAND, "--to", "0.2", "--discard-history"]
    assert container_of(jobs[BEFORE])[0]["command"] == [*COMMAND, "--only", "store"]


def test_the_jobs_reach_broker_and_database_alone() -> None:
    """Nobody reaches them."""
    policy = of_kind(rendered("cluster"), "NetworkPolicy")["gpu-autoscaler-migrate"]["spec"]
    assert policy["ingress"] == []
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 4222, 5433}
