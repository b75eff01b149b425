"""ResourceQuotas become facts where the setting asks for it, with the amounts that pods count against."""

from datetime import timedelta

import pytest
from tests.support.watch_items import T0, changed, decoded, listed, new_watcher

from gpu_autoscaler.events.pod import PodQuotaGone, PodQuotaListed, PodQuotaObserved
from gpu_autoscaler.kube.protocol import QUOTAS, Bookmark, Deleted
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler.model.scheduling import LabelRequirement
from gpu_autoscaler_services.pod_watcher.service import BUDGETS_WATCHED_SECONDS, PodWatcher


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher with the setting on."""
    return new_watcher(are_quotas_watched=True)


def quota(version: int = 5, hard: dict[str, str] | None = None, used: str = "4", **spec: object) -> Object:
    """A quota of GPUs, as the API server sends it."""
    amounts = hard or {"requests.nvidia.com/gpu": "16", "requests.memory": "1Gi", "services": "3", "pods": "10"}
    status = {"hard": amounts, "used": {"requests.nvidia.com/gpu": used, "services": "1"}}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}}
    return decoded(QUOTAS, {**body, "spec": {"hard": amounts, **spec}, "status": status}, version, namespace="research")


async def test_a_quota_is_published_with_the_amounts_of_pods(watcher: PodWatcher) -> None:
    """In thousandths; services are none of ours, and a key without a reported use is unknown."""
    observed, whole = await watcher.on_item(listed(QUOTAS, quota()))
    assert observed == PodQuotaObserved(
        epoch=7,
        version=5,
        quota_uid="gpus",
        namespace="research",
        name="gpus",
        hard_milli=(("pods", 10_000), ("requests.memory", 2**30 * 1000), ("requests.nvidia.com/gpu", 16_000)),
        used_milli=(("requests.nvidia.com/gpu", 4_000),),
    )
    assert whole == PodQuotaListed(epoch=7, version=100, quota_uids=("gpus",), listed_at=T0)
    assert list(watcher.living()) == [observed, whole], "published again before the stream discards them"


async def test_a_change_that_no_pod_sees_is_not_published(watcher: PodWatcher) -> None:
    """Another label; then another use."""
    await watcher.on_item(listed(QUOTAS, quota()))
    assert await watcher.on_item(changed(QUOTAS, quota(6))) == []
    (fact,) = await watcher.on_item(changed(QUOTAS, quota(7, used="5")))
    assert isinstance(fact, PodQuotaObserved)
    assert (fact.version, fact.used_milli) == (7, (("requests.nvidia.com/gpu", 5_000),))


async def test_both_forms_of_scopes_are_published(watcher: PodWatcher) -> None:
    """A name, and an expression."""
    selector = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}
    (fact, _) = await watcher.on_item(listed(QUOTAS, quota(scopes=["NotBestEffort"], scopeSelector=selector)))
    assert isinstance(fact, PodQuotaObserved)
    assert fact.scopes == (
        LabelRequirement("NotBestEffort", "Exists"),
        LabelRequirement("PriorityClass", "In", ("high",)),
    )


async def test_a_quota_ends_and_its_list_is_repeated_as_heartbeat(watcher: PodWatcher) -> None:
    """As for PodDisruptionBudgets."""
    await watcher.on_item(listed(QUOTAS, quota()))
    later = T0 + timedelta(seconds=BUDGETS_WATCHED_SECONDS)
    facts = await watcher.on_item(Bookmark(kind=QUOTAS, version=111, seen_at=later))
    assert facts == [PodQuotaListed(epoch=7, version=111, quota_uids=("gpus",), listed_at=later)]
    (gone,) = await watcher.on_item(Deleted(kind=QUOTAS, object=quota(120), seen_at=later))
    assert gone == PodQuotaGone(epoch=7, version=120, quota_uid="gpus", namespace="research", name="gpus")


async def test_an_unreadable_amount_is_ignored_with_its_quota(watcher: PodWatcher) -> None:
    """It still counts as listed, so that it is not taken for deleted."""
    (whole,) = await watcher.on_item(listed(QUOTAS, quota(hard={"pods": "a few"})))
    assert whole == PodQuotaListed(epoch=7, version=100, quota_uids=("gpus",), listed_at=T0)


def test_without_the_setting_quotas_are_not_watched() -> None:
    """Releases up to 0.2 would set these facts aside."""
    kinds = (len(new_watcher().sources()), len(new_watcher(are_quotas_watched=True).sources()))
    assert kinds[1] == kinds[0] + 1
