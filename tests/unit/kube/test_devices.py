"""GPU demand of device claims. The simple case is read; everything else is reported as unsupported, never guessed."""

import json
from typing import Any

import pytest
from tests.support.kube_objects import Json, pod

from gpu_autoscaler.kube.protocol import DEVICE_CLAIMS, DEVICE_CLASSES, DEVICE_SLICES, DEVICE_TEMPLATES, PODS
from gpu_autoscaler.kube.translate.devices import Claimed, Claims, Offered, claimed, offered
from gpu_autoscaler.kube.wire.core import Pod
from gpu_autoscaler.kube.wire.devices import DeviceClass, ResourceSlice
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, gpu_model_name

CLASS = "gpu.nvidia.com"
PRODUCT = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100 80GB HBM3"'


def asking(called: str = "a", **where: str) -> Pod:
    """A pod with one claim."""
    item = pod(called, resourceClaims=[{"name": "gpus", **where}])
    item["metadata"] |= {"namespace": "default", "uid": f"uid-{called}", "resourceVersion": "1"}
    return PODS.decode(json.dumps(item).encode(), "read")


def request(**exactly: Any) -> Json:  # noqa: ANN401 - JSON
    """One request of a claim."""
    return {"name": "gpus", "exactly": {"deviceClassName": CLASS, **exactly}}


def device_class(*expressions: str) -> DeviceClass:
    """A class whose devices are like this."""
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return DEVICE_CLASSES.decode(
        json.dumps({"metadata": {"name": "x"}, "spec": {"selectors": selectors}}).encode(), "read"
    )


IS_GPU = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
CLASSES = {
    CLASS: device_class(IS_GPU),
    "mig.nvidia.com": device_class(IS_GPU.replace("'gpu'", "'mig'")),
    "large": device_class(IS_GPU, f"device.capacity['{CLASS}'].memory.compareTo(quantity('70Gi')) >= 0"),
    "nic": device_class("device.driver == 'nic.example.com'"),
    "whatever": device_class(),
}


def claims(
    *requests: Json,
    classes: dict[str, DeviceClass] = CLASSES,
    first: Pod | None = None,
    **more: Any,  # noqa: ANN401 - JSON
) -> Claims:
    """A template of these requests, and a claim of them."""
    devices = {"requests": requests, **more.get("devices", {})}
    template = {"metadata": {"name": "t", "namespace": "default"}, "spec": {"spec": {"devices": devices}}}
    claim = {"metadata": {"name": "c"}, "spec": {"devices": devices}, "status": more.get("status", {})}
    return Claims(
        claims={("default", "c"): DEVICE_CLAIMS.decode(json.dumps(claim).encode(), "read")},
        templates={("default", "t"): DEVICE_TEMPLATES.decode(json.dumps(template).encode(), "read")},
        classes=classes,
        first_users={} if first is None else {("default", "c"): first},
    )


def one(count: int, **more: Any) -> Json:  # noqa: ANN401 - JSON
    """One alternative of a request."""
    return {"deviceClassName": CLASS, "count": count, **more}


def alternatives(*said: Json) -> Json:
    """A request of several, named a, b, ..."""
    named = [{"name": name, **each} for name, each in zip("abc", said, strict=False)]
    return {"name": "g", "firstAvailable": named}


FROM_TEMPLATE = asking(resourceClaimTemplateName="t")
NAMED = asking(resourceClaimName="c")


def memory(test: str, size: str) -> str:
    """A condition on the memory of a GPU."""
    return f"device.capacity['{CLASS}'].memory.compareTo(quantity('{size}')) {test} 0"


def attribute(name: str, test: str) -> str:
    """A condition on an attribute."""
    return f"device.attributes['{CLASS}'].{name}{test}"


HOPPER = attribute("architecture", " == 'Hopper'")
LARGE = ("A100", "B200", "H100", "H200", "L40S")


@pytest.mark.parametrize(
    ("expression", "models", "memory_gib"),
    [
        (PRODUCT, ("H100",), None),
        (f"{PRODUCT} && device.attributes['gpu.nvidia.com'].type == 'gpu'", ("H100",), None),
        ('device.driver == "gpu.nvidia.com"', (), None),
        # Some A100s have 40 GB, and it is unknown whether their driver reports 40Gi.
        (memory(">=", "40Gi"), LARGE, 43.2),
        (memory(">=", "60Gi"), ("A100", "B200", "H100", "H200"), 72.0),
        (memory(">=", "100Gi"), ("B200", "H200"), None),
        (f"{memory('>=', '20Gi')} && {memory('<', '30Gi')}", ("A10", "A10G", "L4"), None),
        (f"device.capacity['{CLASS}'].memory.isGreaterThan(quantity('160Gi'))", ("B200",), None),
        (PRODUCT.replace("H100", "A100"), ("A100",), 72.0),
        (HOPPER, ("H100", "H200"), None),
        (attribute("architecture", " in ['Ada Lovelace', 'Volta']"), ("L4", "L40S", "V100"), None),
        (attribute("architecture", " != 'Hopper'") + " && " + memory(">", "100Gi"), ("B200",), None),
        (attribute("cudaComputeCapability", ".compareTo(semver('9.0.0')) >= 0"), ("B200", "H100", "H200"), None),
        (attribute("productName", ".contains('H100')"), ("H100",), None),
        (f"!({HOPPER}) && {memory('>=', '100Gi')}", ("B200",), None),
        # Whatever is not known on one side of an "or" does not matter where the other side holds.
        (attribute("driverVersion", ".isLessThan(semver('600.0.0'))") + f" || {PRODUCT}", ("H100",), None),
    ],
)
def test_so_many_gpus_that_meet_a_condition_are_read(
    expression: str, models: tuple[str, ...], memory_gib: float | None
) -> None:
    """The models that meet it whatever else they are, and the memory where a model is sold in several sizes."""
    found = claimed(FROM_TEMPLATE, claims(request(count=4, selectors=[{"cel": {"expression": expression}}])))
    least = None if memory_gib is None else int(memory_gib * GIBIBYTE)
    assert found == Claimed(gpu_count=4, gpu_models=models, gpu_memory_bytes_min=least)


def test_selectors_of_a_class_count_as_those_of_a_request() -> None:
    """A class of one's own, over the driver's devices; together with what the request says."""
    assert claimed(NAMED, claims(request(deviceClassName="large"))).gpu_models == ("A100", "B200", "H100", "H200")
    hopper = [{"cel": {"expression": attribute("architecture", " == 'Hopper'")}}]
    both = claimed(NAMED, claims(request(deviceClassName="large", selectors=hopper)))
    assert both == Claimed(gpu_count=1, gpu_models=("H100", "H200"))


def test_a_part_of_a_gpu_is_asked_for_by_its_profile() -> None:
    """It is the slice that the device plugin calls so; of a model where one is named."""
    small = attribute("profile", " == '1g.10gb'")
    found = claimed(
        NAMED, claims(request(deviceClassName="mig.nvidia.com", count=2, selectors=[{"cel": {"expression": small}}]))
    )
    assert found == Claimed(slices=(("nvidia.com/mig-1g.10gb", 2),))
    hopper = f"{small} && {HOPPER}"
    found = claimed(
        NAMED, claims(request(deviceClassName="mig.nvidia.com", selectors=[{"cel": {"expression": hopper}}]))
    )
    assert found == Claimed(slices=(("nvidia.com/mig-1g.10gb", 1),), gpu_models=("H100", "H200"))


def test_of_pods_that_share_a_claim_the_first_asks_for_it() -> None:
    """The others go where that one is, so nothing is bought for them meanwhile."""
    known = claims(request(count=2), first=asking("b", resourceClaimName="c"))
    assert claimed(asking("b", resourceClaimName="c"), known).gpu_count == 2
    assert "ResourceClaim default/c is shared with pod b" in claimed(NAMED, known).problem


def allocated(*users: str, devices: int = 2, request: str = "gpus") -> Json:
    """The status of a claim that has its devices on n1."""
    results = [
        {"request": request, "driver": CLASS, "pool": "n1", "device": f"gpu-{number}"} for number in range(devices)
    ]
    where = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    return {
        "reservedFor": [{"resource": "pods", "name": user, "uid": f"uid-{user}"} for user in users],
        "allocation": {
            "devices": {"results": results},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [where]}]},
        },
    }


def test_what_was_allocated_counts_once_and_ties_others_to_its_node() -> None:
    """For the first pod that it is reserved for; also where what was asked for could not be read before."""
    known = claims(request(allocationMode="All"), status=allocated("b", "a", devices=8))
    runs = asking("b", resourceClaimName="c")
    assert claimed(runs, known).gpu_count == 8
    waits = claimed(asking("z", resourceClaimName="c"), known)
    assert (waits.gpu_count, waits.problem) == (0, "")
    ((term,),) = waits.alternatives
    assert [(one.key, one.values) for one in term.requirements] == [("metadata.name", ("n1",))]


def test_gpus_that_are_alike_anyway_may_be_asked_to_be() -> None:
    """All of one machine are of one product; a common bus root is another matter, unless there is one GPU alone."""
    alike = {"constraints": [{"matchAttribute": f"{CLASS}/productName"}]}
    assert claimed(NAMED, claims(request(count=4), devices=alike)).gpu_count == 4
    root = {"constraints": [{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]}
    assert claimed(NAMED, claims(request(), devices=root)).gpu_count == 1
    assert (
        "constraints, matchAttribute resource.kubernetes.io/pcieRoot"
        in claimed(NAMED, claims(request(count=2), devices=root)).problem
    )


def test_every_gpu_model_can_be_judged() -> None:
    """One that is added to the models is described here as well."""
    found = claimed(NAMED, claims(request(selectors=[{"cel": {"expression": memory(">", "1Gi")}}])))
    assert set(found.gpu_models) == set(GPU_MODELS)


def test_several_requests_add_up_and_a_look_at_others_costs_nothing() -> None:
    """Two and one are three; administrators' access takes no device."""
    found = claimed(NAMED, claims(request(count=2), request(), request(adminAccess=True, count=8)))
    assert found == Claimed(gpu_count=3)


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (
            claims(alternatives(one(1), one(2))),
            "ResourceClaim default/c, request g, firstAvailable: it has alternatives",
        ),
        (claims(alternatives(one(1), one(1, deviceClassName="x"))), "request g, firstAvailable b, deviceClassName"),
        (claims({"name": "g"}), "neither exactly nor firstAvailable"),
        (claims(request(deviceClassName="mig.nvidia.com")), "deviceClassName mig.nvidia.com: the matching GPUs"),
        (claims(request(deviceClassName="nic")), "devices of class nic"),
        (claims(request(deviceClassName="whatever")), "devices of class whatever"),
        (claims(request(capacity={"requests": {"memory": "10Gi"}})), "request gpus, capacity: it requests a share"),
        (
            claims(request(selectors=[{"cel": {"expression": memory(">=", "80Gi") + " && " + PRODUCT}}])),
            "selectors: the matching GPUs",
        ),
        (
            claims(request(selectors=[{"cel": {"expression": attribute("driverVersion", " == '1'")}}])),
            "the matching GPUs",
        ),
        (claims(request(selectors=[{"cel": {"expression": "device.attributes.exists(a, true)"}}])), ".exists"),
        (claims(request(), classes={}), "DeviceClass gpu.nvidia.com does not exist"),
        (claims(request(allocationMode="All")), "allocationMode: All requests"),
        (
            claims(request(selectors=[{"cel": {"expression": "device.capacity['x'].memory + 3"}}])),
            "request gpus, selectors: a condition is not understood",
        ),
        (claims(request(selectors=[{"cel": {"expression": "device.driver.matches('gpu.*')"}}])), "not understood"),
        (
            claims(request(selectors=[{"cel": {"expression": PRODUCT.replace("H100", "A100").replace("80", "40")}}])),
            "sizes",
        ),
        (claims(request(count=2), devices={"constraints": [{"matchAttribute": "x/y"}]}), "unknown which GPUs"),
        (claims(request(), status={"reservedFor": [{"name": "b", "uid": "uid-b"}]}), "shared with pod b"),
    ],
)
def test_an_unsupported_claim_is_reported(known: Claims, says: str) -> None:
    """In words, and with no count: a wrong one would buy the wrong thing."""
    found = claimed(NAMED, known)
    assert says in found.problem
    assert found.gpu_count == 0


def test_alternatives_that_come_to_the_same_are_read() -> None:
    """Every alternative is the same number of GPUs of that model."""
    h100 = [{"cel": {"expression": PRODUCT}}]
    both = alternatives(one(2, selectors=h100), one(2, selectors=[*h100, {"cel": {"expression": PRODUCT}}]))
    assert claimed(NAMED, claims(both)) == Claimed(gpu_count=2, gpu_models=("H100",))


def test_a_missing_claim_is_reported_by_name() -> None:
    """Whoever makes it has not."""
    assert "ResourceClaimTemplate default/t does not exist" in claimed(FROM_TEMPLATE, Claims()).problem
    assert "ResourceClaim default/c does not exist" in claimed(NAMED, Claims()).problem


def slice_of(
    name: str,
    *products: str,
    generation: int = 1,
    driver: str = CLASS,
    kind: str = "gpu",
    attributes: Json | None = None,
    **device: Any,  # noqa: ANN401 - JSON
) -> ResourceSlice:
    """A slice with a device for each product."""
    said = [
        {"type": {"string": kind}, "productName": {"string": product}, **(attributes or {})} for product in products
    ]
    devices = [{"name": f"gpu-{number}", "attributes": each, **device} for number, each in enumerate(said)]
    pool = {"name": "n1", "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": "n1", "pool": pool, "devices": devices}
    return DEVICE_SLICES.decode(json.dumps({"metadata": {"name": name}, "spec": spec}).encode(), "read")


def test_whole_gpus_of_the_newest_slices_are_counted() -> None:
    """Not those of an older generation of the pool, of another driver, or parts of a GPU."""
    product = "NVIDIA H100 80GB HBM3"
    there = [
        slice_of("old", product, product, product),
        slice_of("new", product, product, generation=2),
        slice_of("mig", product, generation=2, kind="mig"),
        slice_of("nic", "nic", driver="nic.example.com"),
    ]
    assert offered(there) == Offered(gpu_count=2, product=product)
    assert offered([]) == Offered()
    assert offered([slice_of("mixed", product, "NVIDIA L4")]) == Offered(gpu_count=2)


def test_a_virtual_gpu_is_no_gpu_of_its_model() -> None:
    """Eight of its forty gigabytes: who names the product waits for one, and is bought no whole A100."""
    assert gpu_model_name("GRID A100-8C") is None
    named = attribute("productName", " == 'GRID A100-8C'")
    assert "the matching GPUs" in claimed(NAMED, claims(request(selectors=[{"cel": {"expression": named}}]))).problem


def test_parts_of_gpus_are_room_where_they_are_cut_already() -> None:
    """By profile; what is cut out of a GPU only when it is asked for is no room besides that GPU."""
    product = "NVIDIA H100 80GB HBM3"
    cut = slice_of("cut", product, product, kind="mig", attributes={"profile": {"string": "1g.10gb"}})
    assert offered([cut]) == Offered(slices=(("nvidia.com/mig-1g.10gb", 2),), product=product)
    counters = [{"counterSet": "gpu-0", "counters": {"memory": {"value": "10Gi"}}}]
    later = slice_of(
        "later", product, kind="mig", attributes={"profile": {"string": "1g.10gb"}}, consumesCounters=counters
    )
    whole = slice_of("whole", product, consumesCounters=counters)
    assert offered([later, whole]) == Offered(gpu_count=1, product=product)


def test_a_gpu_that_is_tainted_is_no_room() -> None:
    """Its driver or an operator keeps work off."""
    taint = {"key": "gpu.nvidia.com/xid", "effect": "NoSchedule", "timeAdded": "2026-11-22T00:00:00Z"}
    assert offered([slice_of("sick", "NVIDIA L4", taints=[taint])]).gpu_count == 0
