"""ProvisioningRequests become facts with their PodTemplates, where the setting asks for it."""

from datetime import timedelta
from typing import Any

import pytest
from tests.support.kube_objects import Json, pod
from tests.support.watch_items import T0, changed, decoded, listed, new_watcher

from gpu_autoscaler.events.pod import PodProvisioningGone, PodProvisioningListed, PodProvisioningObserved
from gpu_autoscaler.kube.protocol import POD_TEMPLATES, PROVISIONING_REQUESTS, Bookmark, Deleted
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler.model.demands import BEST_EFFORT_ATOMIC, CHECK_CAPACITY, PodSet, ProvisioningCondition
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler_services.pod_watcher.service import BUDGETS_WATCHED_SECONDS, PodWatcher

EIGHT_GPUS = Resources(cpu_milli=100, memory_bytes=64 * 2**20, gpu_count=8, pod_count=1)


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher with the setting on."""
    return new_watcher(are_provisioning_requests_served=True)


def template(version: int = 4, gpus: int = 8, annotations: Json | None = None, **spec: Any) -> Object:  # noqa: ANN401 - fields of a pod's spec
    """A PodTemplate of pods with these GPUs."""
    body = pod("p", gpus=gpus, annotations=annotations, **spec)
    own = {"metadata": body["metadata"], "spec": body["spec"]}
    return decoded(POD_TEMPLATES, {"metadata": {"name": "t"}, "template": own}, version, namespace="research")


def request(
    version: int = 5, class_name: str = BEST_EFFORT_ATOMIC, conditions: tuple[Json, ...] = (), **parameters: str
) -> Object:
    """A request for two pods of the template, as the API server sends it."""
    spec = {
        "provisioningClassName": class_name,
        "parameters": parameters,
        "podSets": [{"podTemplateRef": {"name": "t"}, "count": 2}],
    }
    body = {"metadata": {"name": "r"}, "spec": spec, "status": {"conditions": list(conditions)}}
    return decoded(PROVISIONING_REQUESTS, body, version, namespace="research")


async def published(watcher: PodWatcher, *objects: Object) -> PodProvisioningObserved:
    """The fact about the only request."""
    await watcher.on_item(listed(POD_TEMPLATES, *(objects or (template(),)), version=50))
    (fact, _) = await watcher.on_item(listed(PROVISIONING_REQUESTS, request()))
    assert isinstance(fact, PodProvisioningObserved)
    return fact


async def test_a_request_is_published_with_its_pods(watcher: PodWatcher) -> None:
    """At the version up to which its templates are known; then the list, which is repeated for the stream."""
    await watcher.on_item(listed(POD_TEMPLATES, template(), version=50))
    observed, whole = await watcher.on_item(listed(PROVISIONING_REQUESTS, request()))
    assert observed == PodProvisioningObserved(
        epoch=7, version=50, request_uid="r", namespace="research", name="r", class_name=BEST_EFFORT_ATOMIC,
        created_at=T0 - timedelta(hours=1), members_count=2, pod_sets=(PodSet(count=2, requests=EIGHT_GPUS),),
    )  # fmt: skip
    assert whole == PodProvisioningListed(epoch=7, version=100, request_uids=("r",), listed_at=T0)
    assert list(watcher.living()) == [observed, whole]


async def test_a_request_waits_for_the_list_of_templates(watcher: PodWatcher) -> None:
    """Before, its template would seem to be missing."""
    assert await watcher.on_item(listed(PROVISIONING_REQUESTS, request()))
    (fact,) = await watcher.on_item(listed(POD_TEMPLATES, template(), version=101))
    assert isinstance(fact, PodProvisioningObserved)
    assert (fact.trouble, fact.version) == ("", 101)


async def test_a_template_may_follow_its_request(watcher: PodWatcher) -> None:
    """As Kueue makes them; the request has a trouble meanwhile."""
    await watcher.on_item(listed(POD_TEMPLATES, version=50))
    (fact, _) = await watcher.on_item(listed(PROVISIONING_REQUESTS, request()))
    assert isinstance(fact, PodProvisioningObserved)
    assert (fact.trouble, fact.pod_sets) == ("PodTemplate research/t does not exist", ())
    (fact,) = await watcher.on_item(changed(POD_TEMPLATES, template(120)))
    assert isinstance(fact, PodProvisioningObserved)
    assert (fact.trouble, len(fact.pod_sets), fact.version) == ("", 1, 120)


async def test_parameters_are_read(watcher: PodWatcher) -> None:
    """How long it is valid, and whether it is tried again; nonsense is a trouble, not a default."""
    await published(watcher)
    (fact,) = await watcher.on_item(
        changed(PROVISIONING_REQUESTS, request(121, ValidUntilSeconds="90", noRetry="true"))
    )
    assert isinstance(fact, PodProvisioningObserved)
    assert (fact.valid_seconds, fact.is_tried_once) == (90.0, True)
    for nonsense in ("soon", "-1", "inf", "0"):
        other = new_watcher(are_provisioning_requests_served=True)
        await other.on_item(listed(POD_TEMPLATES, template(), version=50))
        (fact, _) = await other.on_item(listed(PROVISIONING_REQUESTS, request(ValidUntilSeconds=nonsense)))
        assert isinstance(fact, PodProvisioningObserved)
        assert "not a positive number of seconds" in fact.trouble


async def test_conditions_and_topology_are_read(watcher: PodWatcher) -> None:
    """Known conditions with their instants, and the label that all pods must share."""
    shared = template(annotations={"kueue.x-k8s.io/podset-required-topology": "topology.kubernetes.io/zone"})
    assert (await published(watcher, shared)).within == "topology.kubernetes.io/zone"
    at = "2026-11-21T11:30:00Z"
    known = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": at}
    other = {**known, "type": "OfAnother"}
    (fact,) = await watcher.on_item(changed(PROVISIONING_REQUESTS, request(130, conditions=(known, other))))
    assert isinstance(fact, PodProvisioningObserved)
    since = T0 - timedelta(minutes=30)
    assert fact.conditions == (ProvisioningCondition(type="Accepted", is_true=True, since=since, reason="Accepted"),)


async def test_an_invalid_template_is_a_trouble(watcher: PodWatcher) -> None:
    """It is published, so that the request can be failed."""
    resources = {"requests": {"cpu": "a lot"}}
    fact = await published(watcher, template(containers=[{"name": "c", "resources": resources}]))
    assert "a lot" in fact.trouble


async def test_other_classes_belong_to_others(watcher: PodWatcher) -> None:
    """They are not published; a check is."""
    await watcher.on_item(listed(POD_TEMPLATES, template(), version=50))
    facts = await watcher.on_item(listed(PROVISIONING_REQUESTS, request(class_name="queued-provisioning.gke.io")))
    assert [type(fact) for fact in facts] == [PodProvisioningListed]
    facts = await watcher.on_item(changed(PROVISIONING_REQUESTS, request(120, class_name=CHECK_CAPACITY)))
    assert [fact.class_name for fact in facts if isinstance(fact, PodProvisioningObserved)] == [CHECK_CAPACITY]


async def test_a_request_ends(watcher: PodWatcher) -> None:
    """By its deletion, at a version not before its last fact, or by a list without it."""
    await published(watcher)
    await watcher.on_item(changed(POD_TEMPLATES, template(180, gpus=4)))
    (gone,) = await watcher.on_item(Deleted(kind=PROVISIONING_REQUESTS, object=request(150), seen_at=T0))
    assert gone == PodProvisioningGone(epoch=7, version=180, request_uid="r", namespace="research", name="r")
    other = new_watcher(are_provisioning_requests_served=True)
    await published(other)
    await other.on_item(changed(POD_TEMPLATES, template(180, gpus=4)))
    facts = await other.on_item(listed(PROVISIONING_REQUESTS, version=160))
    assert [type(fact) for fact in facts] == [PodProvisioningGone, PodProvisioningListed]


async def test_a_cluster_without_the_kind_has_no_requests(watcher: PodWatcher) -> None:
    """The watch of a kind that is not installed gives an empty list; the heartbeat goes on."""
    (whole,) = await watcher.on_item(listed(PROVISIONING_REQUESTS, version=0))
    assert whole == PodProvisioningListed(epoch=7, version=0, request_uids=(), listed_at=T0)
    later = T0 + timedelta(seconds=BUDGETS_WATCHED_SECONDS)
    assert len(await watcher.on_item(Bookmark(kind=PROVISIONING_REQUESTS, version=1, seen_at=later))) == 1


def test_without_the_setting_requests_are_not_watched() -> None:
    """Releases up to 0.2 would set these facts aside."""
    kinds = (len(new_watcher().sources()), len(new_watcher(are_provisioning_requests_served=True).sources()))
    assert kinds[1] == kinds[0] + 2
