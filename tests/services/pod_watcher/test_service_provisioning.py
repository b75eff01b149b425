"""ProvisioningRequests become facts with their PodTemplates, where the setting asks for it."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from tests.support.kube_objects import Json, pod
from tests.support.watch_items import T0, changed, decoded, device_spec, listed, new_watcher, thing, volume_spec

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.pod import PodProvisioningGone, PodProvisioningListed, PodProvisioningObserved
from gpu_autoscaler.kube.protocol import (
    CLAIMS,
    CLASSES,
    DEVICE_CLAIMS,
    DEVICE_CLASSES,
    DEVICE_TEMPLATES,
    POD_TEMPLATES,
    PRIORITY_CLASSES,
    PROVISIONING_REQUESTS,
    VOLUMES,
    Bookmark,
    Deleted,
    Kind,
)
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler.model.demands import BEST_EFFORT_ATOMIC, CHECK_CAPACITY, PodSet, ProvisioningCondition
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import LabelRequirement
from gpu_autoscaler_services.pod_watcher.related_objects import DEVICE_KINDS, STORAGE_KINDS
from gpu_autoscaler_services.pod_watcher.service import BUDGETS_WATCHED_SECONDS, PodWatcher

EIGHT_GPUS = Resources(cpu_milli=100, memory_bytes=64 * 2**20, gpu_count=8, pod_count=1)


async def serving(*classes: Object) -> PodWatcher:
    """A watcher with the setting on that knows these PriorityClasses, and that there are no claims."""
    watcher = new_watcher(are_provisioning_requests_served=True)
    await watcher.on_item(listed(PRIORITY_CLASSES, *classes, version=1))
    for kind in (*STORAGE_KINDS, *DEVICE_KINDS):
        assert await watcher.on_item(listed(kind, version=1)) == []
    return watcher


@pytest.fixture
async def watcher() -> PodWatcher:
    """A watcher with the setting on."""
    return await serving()


def template(version: int = 4, gpus: int = 8, annotations: Json | None = None, **spec: Any) -> Object:  # noqa: ANN401 - fields of a pod's spec
    """A PodTemplate of pods with these GPUs."""
    body = pod("p", gpus=gpus, annotations=annotations, **spec)
    own = {"metadata": body["metadata"], "spec": body["spec"]}
    return decoded(POD_TEMPLATES, {"metadata": {"name": "t"}, "template": own}, version, namespace="research")


def request(
    version: int = 5,
    class_name: str = BEST_EFFORT_ATOMIC,
    conditions: tuple[Json, ...] = (),
    count: int = 2,
    **parameters: str,
) -> Object:
    """A request for pods of the template, as the API server sends it."""
    spec = {
        "provisioningClassName": class_name,
        "parameters": parameters,
        "podSets": [{"podTemplateRef": {"name": "t"}, "count": count}],
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
        other = await serving()
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


# ---- priority, volumes and device claims of the pods to come

DATA: Json = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
GPUS: Json = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]}
SHARED: Json = {"resourceClaims": [{"name": "gpus", "resourceClaimName": "gpus"}]}
SLOW = thing(CLASSES, "slow", 2, provisioner="ebs.csi.aws.com", volumeBindingMode="Immediate")


def only(facts: Sequence[Fact]) -> tuple[PodProvisioningObserved, PodSet]:
    """The only fact, and its only pod set."""
    (fact,) = facts
    assert isinstance(fact, PodProvisioningObserved)
    (pod_set,) = fact.pod_sets
    return fact, pod_set


def in_research(kind: Kind[Any], spec: Json, *, name: str = "gpus", version: int = 120) -> Object:
    """An object in the namespace of the request."""
    return decoded(kind, {"metadata": {"name": name}, "spec": spec}, version, namespace="research")


def priority_class(name: str, value: int, version: int = 1, **fields: Any) -> Object:  # noqa: ANN401 - fields of the kind
    """A PriorityClass."""
    return thing(PRIORITY_CLASSES, name, version, value=value, **fields)


async def test_pods_get_the_priority_of_their_class() -> None:
    """Of the class that the template names, otherwise of the default one, whatever the template has as priority."""
    watcher = await serving(priority_class("urgent", 1000), priority_class("usual", -5, globalDefault=True))
    fact = await published(watcher, template(priorityClassName="urgent"))
    assert fact.pod_sets[0].priority == 1000
    _, pod_set = only(await watcher.on_item(changed(POD_TEMPLATES, template(120, priority=7))))
    assert pod_set.priority == -5


async def test_a_missing_priority_class_is_a_trouble(watcher: PodWatcher) -> None:
    """As the API server would refuse the pods, until the class exists."""
    fact = await published(watcher, template(priorityClassName="urgent"))
    assert (fact.trouble, fact.pod_sets) == ("PriorityClass urgent does not exist", ())
    urgent = priority_class("urgent", 1000, 120)
    fact, pod_set = only(await watcher.on_item(changed(PRIORITY_CLASSES, urgent)))
    assert (fact.trouble, fact.version, pod_set.priority) == ("", 120, 1000)


async def test_pods_go_where_their_volume_is(watcher: PodWatcher) -> None:
    """A claim is missing, then has no volume yet, then one in zone b: the same words and terms as of a pod."""
    (pod_set,) = (await published(watcher, template(**DATA))).pod_sets
    assert (pod_set.volume_trouble, pod_set.requests) == ("claim research/data does not exist", EIGHT_GPUS)
    assert await watcher.on_item(changed(CLASSES, SLOW)) == []
    claim = in_research(CLAIMS, {"storageClassName": "slow"}, name="data")
    fact, pod_set = only(await watcher.on_item(changed(CLAIMS, claim)))
    assert "storage class slow provisions it before the pod is scheduled" in pod_set.volume_trouble
    assert fact.version == 120
    assert await watcher.on_item(changed(VOLUMES, thing(VOLUMES, "v", 121, spec=volume_spec("b")))) == []
    claim = in_research(CLAIMS, {"storageClassName": "slow", "volumeName": "v"}, name="data", version=122)
    _, pod_set = only(await watcher.on_item(changed(CLAIMS, claim)))
    assert pod_set.volume_trouble == ""
    assert [term.requirements for term in pod_set.demands.node_affinity] == [
        (LabelRequirement("topology.kubernetes.io/zone", "In", ("b",)),)
    ]


async def test_an_ephemeral_volume_counts_by_its_template(watcher: PodWatcher) -> None:
    """Its claim comes with the pod: with such a class anywhere, with one that provisions early nowhere."""
    await watcher.on_item(changed(CLASSES, SLOW))
    late = thing(CLASSES, "late", 3, provisioner="ebs.csi.aws.com", volumeBindingMode="WaitForFirstConsumer")
    await watcher.on_item(changed(CLASSES, late))

    def scratch(version: int, class_name: str) -> Object:
        claim = {"spec": {"storageClassName": class_name}}
        return template(version, volumes=[{"name": "scratch", "ephemeral": {"volumeClaimTemplate": claim}}])

    (pod_set,) = (await published(watcher, scratch(4, "late"))).pod_sets
    assert pod_set.volume_trouble == ""
    _, pod_set = only(await watcher.on_item(changed(POD_TEMPLATES, scratch(120, "slow"))))
    assert "provisions it before the pod is scheduled" in pod_set.volume_trouble


async def test_claimed_devices_are_requested(watcher: PodWatcher) -> None:
    """Four GPUs by a claim template that comes late; each pod has a claim of its own."""
    (pod_set,) = (await published(watcher, template(gpus=0, **GPUS))).pod_sets
    assert pod_set.device_trouble == "ResourceClaimTemplate research/gpus does not exist"
    await watcher.on_item(changed(DEVICE_CLASSES, thing(DEVICE_CLASSES, "gpu.nvidia.com", 110)))
    spec = {"spec": device_spec("gpu.nvidia.com", 4)}
    _, pod_set = only(await watcher.on_item(changed(DEVICE_TEMPLATES, in_research(DEVICE_TEMPLATES, spec))))
    assert (pod_set.device_trouble, pod_set.requests.gpu_count) == ("", 4)


@pytest.mark.parametrize(("count", "trouble"), [(1, ""), (2, "is shared by 2 pods of the request")])
async def test_a_device_claim_serves_one_pod(watcher: PodWatcher, count: int, trouble: str) -> None:
    """Pods that share one run on one node, which is not known before."""
    await watcher.on_item(changed(DEVICE_CLASSES, thing(DEVICE_CLASSES, "gpu.nvidia.com", 2)))
    claim = in_research(DEVICE_CLAIMS, device_spec("gpu.nvidia.com", 4))
    await watcher.on_item(changed(DEVICE_CLAIMS, claim))
    await watcher.on_item(listed(POD_TEMPLATES, template(gpus=0, **SHARED), version=50))
    _, pod_set = only((await watcher.on_item(listed(PROVISIONING_REQUESTS, request(count=count))))[:1])
    assert pod_set.requests.gpu_count == 4
    assert trouble in pod_set.device_trouble
    assert bool(trouble) == bool(pod_set.device_trouble)


async def test_a_request_waits_for_the_lists_of_what_its_pods_name() -> None:
    """Before, a claim would seem to be missing; a request without claims does not wait."""
    watcher = new_watcher(are_provisioning_requests_served=True)
    await watcher.on_item(listed(PRIORITY_CLASSES, version=1))
    await watcher.on_item(listed(POD_TEMPLATES, template(**DATA), version=50))
    assert len(await watcher.on_item(listed(PROVISIONING_REQUESTS, request()))) == 1
    for kind in STORAGE_KINDS[:-1]:
        assert await watcher.on_item(listed(kind, version=1)) == []
    _, pod_set = only(await watcher.on_item(listed(STORAGE_KINDS[-1], version=1)))
    assert pod_set.volume_trouble == "claim research/data does not exist"


async def test_an_ended_request_is_published_no_more(watcher: PodWatcher) -> None:
    """A change of a claim that its pods named says nothing then."""
    await published(watcher, template(**DATA))
    await watcher.on_item(Deleted(kind=PROVISIONING_REQUESTS, object=request(150), seen_at=T0))
    claim = in_research(CLAIMS, {"storageClassName": "slow"}, name="data")
    assert await watcher.on_item(changed(CLAIMS, claim)) == []


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
    other = await serving()
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
    assert kinds[1] == kinds[0] + 3
