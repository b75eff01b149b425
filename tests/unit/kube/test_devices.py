"""What claims of devices come to. The plain case is read; everything else is told, and never guessed."""

import json
from typing import Any

import pytest
from tests.support.kube_objects import Json, pod

from gpu_autoscaler.kube.protocol import DEVICE_CLAIMS, DEVICE_SLICES, DEVICE_TEMPLATES, PODS
from gpu_autoscaler.kube.translate.devices import Claimed, Claims, Offered, claimed, offered
from gpu_autoscaler.kube.wire import Pod
from gpu_autoscaler.kube.wire_devices import ResourceSlice

CLASS = "gpu.nvidia.com"
PRODUCT = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100 80GB HBM3"'


def asking(**where: str) -> Pod:
    """A pod with one claim."""
    item = pod("a", resourceClaims=[{"name": "gpus", **where}])
    item["metadata"] |= {"namespace": "default", "uid": "uid-a", "resourceVersion": "1"}
    return PODS.decode(json.dumps(item).encode(), "read")


def request(**exactly: Any) -> Json:  # noqa: ANN401 - JSON
    """One request of a claim."""
    return {"name": "gpus", "exactly": {"deviceClassName": CLASS, **exactly}}


def claims(*requests: Json, classes: tuple[str, ...] = (CLASS,), **more: Any) -> Claims:  # noqa: ANN401 - JSON
    """A template of these requests, and a claim of them."""
    devices = {"requests": requests, **more.get("devices", {})}
    template = {"metadata": {"name": "t", "namespace": "default"}, "spec": {"spec": {"devices": devices}}}
    claim = {"metadata": {"name": "c"}, "spec": {"devices": devices}, "status": more.get("status", {})}
    return Claims(
        claims={("default", "c"): DEVICE_CLAIMS.decode(json.dumps(claim).encode(), "read")},
        templates={("default", "t"): DEVICE_TEMPLATES.decode(json.dumps(template).encode(), "read")},
        classes=frozenset(classes),
    )


FROM_TEMPLATE = asking(resourceClaimTemplateName="t")
NAMED = asking(resourceClaimName="c")


@pytest.mark.parametrize(
    ("expression", "model"),
    [
        (PRODUCT, "H100"),
        (f"{PRODUCT} && device.attributes['gpu.nvidia.com'].type == 'gpu'", "H100"),
        ('device.driver == "gpu.nvidia.com"', None),
    ],
)
def test_so_many_gpus_of_a_product_or_of_any_are_read(expression: str, model: str | None) -> None:
    """By count and by the attributes that the driver publishes."""
    found = claimed(FROM_TEMPLATE, claims(request(count=4, selectors=[{"cel": {"expression": expression}}])))
    assert found.trouble == ""
    assert (found.gpu_count, found.gpu_model) == (4, model)


def test_several_requests_add_up_and_a_look_at_others_costs_nothing() -> None:
    """Two and one are three; administrators' access takes no device."""
    found = claimed(NAMED, claims(request(count=2), request(), request(adminAccess=True, count=8)))
    assert found == Claimed(gpu_count=3)


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (claims({"name": "g", "firstAvailable": [{"name": "a", "deviceClassName": CLASS}]}), "has alternatives"),
        (claims(request(deviceClassName="mig.nvidia.com")), "class mig.nvidia.com"),
        (claims(request(), classes=()), "no DeviceClass gpu.nvidia.com"),
        (claims(request(allocationMode="All")), "All devices"),
        (claims(request(selectors=[{"cel": {"expression": "device.capacity['x'].memory > 3"}}])), "not understood"),
        (claims(request(selectors=[{"cel": {"expression": f"!({PRODUCT})"}}])), "not understood"),
        (claims(request(selectors=[{"cel": {"expression": PRODUCT.replace("H100", "A100")}}])), "sizes"),
        (claims(request(), devices={"constraints": [{"matchAttribute": "x/y"}]}), "something in common"),
        (claims(request(), status={"reservedFor": [{"name": "b", "uid": "uid-b"}]}), "shared with b"),
    ],
)
def test_what_is_not_plain_is_told(known: Claims, says: str) -> None:
    """In words, and with no count: a wrong one would buy the wrong thing."""
    found = claimed(NAMED, known)
    assert says in found.trouble
    assert found.gpu_count == 0


def test_a_claim_that_is_not_there_is_told_by_name() -> None:
    """Whoever makes it has not."""
    assert "ResourceClaimTemplate default/t does not exist" in claimed(FROM_TEMPLATE, Claims()).trouble
    assert "ResourceClaim default/c does not exist" in claimed(NAMED, Claims()).trouble


def slice_of(name: str, *products: str, generation: int = 1, driver: str = CLASS, kind: str = "gpu") -> ResourceSlice:
    """A slice with a device for each product."""
    attributes = [{"type": {"string": kind}, "productName": {"string": product}} for product in products]
    devices = [{"name": f"gpu-{number}", "attributes": said} for number, said in enumerate(attributes)]
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
