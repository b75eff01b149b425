"""Translation of Google Cloud machine types, errors, termination reasons and prices."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.catalog import KNOWN_INSTANCE_TYPES, part_of, price_of
from gpu_autoscaler.providers.gcp.market import spot_of
from gpu_autoscaler.providers.gcp.translate import (
    denied_kind,
    failure,
    is_passing,
    is_throttled,
    parse_instance_type,
    past_of,
    refusal,
)
from gpu_autoscaler.providers.protocol import LaunchRefused
from gpu_autoscaler.providers.rest import Answer

CREATE = "instanceGroupManagers.createInstances"
ZONE_URL = "https://www.googleapis.com/compute/v1/projects/p/zones/europe-west4-a"
CARRIES = {
    "a2-highgpu-8g": ("A100", 8, 40),
    "a2-ultragpu-8g": ("A100", 8, 80),
    "a3-highgpu-8g": ("H100", 8, 80),
    "a3-megagpu-8g": ("H100", 8, 80),
    "a3-ultragpu-8g": ("H200", 8, 141),
    "g2-standard-48": ("L4", 4, 24),
}


@pytest.mark.parametrize("name", CARRIES)
def test_resources_of_an_instance_type(name: str) -> None:
    """GPU model, GPU count and memory, under the names that Kubernetes uses."""
    kind = KNOWN_INSTANCE_TYPES[name]
    model, count, gibibytes = CARRIES[name]
    assert (kind.gpu_model, kind.resources.gpu_count, kind.gpu_memory_bytes) == (model, count, gibibytes * GIBIBYTE)


def test_gpus_of_the_template_are_included() -> None:
    """N1 has none of its own; accelerators of other manufacturers are not offered."""
    told: dict[str, Any] = {"name": "n1-standard-8", "guestCpus": 8, "memoryMb": 30720}
    added = [{"acceleratorType": f"{ZONE_URL}/acceleratorTypes/nvidia-tesla-v100", "acceleratorCount": 2}]
    kind = parse_instance_type(told, added)
    assert kind is not None
    assert (kind.gpu_model, kind.resources.gpu_count, kind.gpu_memory_bytes) == ("V100", 2, 16 * GIBIBYTE)
    tpus = [{"guestAcceleratorType": "ct6e", "guestAcceleratorCount": 4}]
    assert parse_instance_type({**told, "accelerators": tpus}) is None


def answer(status: int, reason: str) -> Answer:
    """An error as the API tells it."""
    error = {"code": status, "message": "as told", "errors": [{"reason": reason, "message": "as told"}]}
    return Answer(status=status, body={"error": error}, headers={})


# Every refusal that has a meaning of its own: what kind it is, and how far it reaches.
REFUSALS = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": ("capacity", "offer"),
    "REGION_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "INSUFFICIENT_CAPACITY": ("capacity", "offer"),
    "RESERVATION_CAPACITY_EXCEEDED": ("capacity", "offer"),
    "RESERVATION_NOT_READY": ("capacity", "offer"),
    "UNSUPPORTED_OPERATION": ("capacity", "offer"),
    "IP_SPACE_EXHAUSTED": ("capacity", "zone"),
    "IP_SPACE_EXHAUSTED_WITH_DETAILS": ("capacity", "zone"),
    "QUOTA_EXCEEDED": ("quota", "region"),
    "quotaExceeded": ("quota", "region"),
    "PERMISSIONS_ERROR": ("permission", "region"),
    "forbidden": ("permission", "region"),
    "accessNotConfigured": ("permission", "region"),
    "VM_EXTERNAL_IP_ACCESS_POLICY_CONSTRAINT": ("configuration", "offer"),
    "an unknown error code": ("configuration", "offer"),
}
PASSING = (
    "RATE_LIMIT_EXCEEDED",
    "RESOURCE_OPERATION_RATE_EXCEEDED",
    "INTERNAL_ERROR",
    "BACKEND_ERROR",
    "RESOURCE_NOT_READY",
)
THROTTLED = ("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED")


@pytest.mark.cloud("gcp", errors=REFUSALS)
@pytest.mark.parametrize("code", REFUSALS)
def test_a_launch_refusal_has_its_kind(code: str) -> None:
    """Capacity, quota or configuration; it keeps the cloud's own code."""
    refused = refusal(CREATE, code, f"{code}: as told")
    assert (refused.kind, refused.scope) == REFUSALS[code]
    assert code in str(refused)
    assert not is_passing(code)


@pytest.mark.cloud("gcp", errors=PASSING)
@pytest.mark.parametrize("code", PASSING)
def test_errors_that_the_group_retries_are_not_refusals(code: str) -> None:
    """Canceling the order would waste the instance that is about to be created."""
    assert is_passing(code)


@pytest.mark.cloud("gcp", errors=THROTTLED)
@pytest.mark.parametrize("reason", THROTTLED)
def test_rate_limits_may_be_403(reason: str) -> None:
    """They are not reported as a missing permission."""
    assert is_throttled(answer(403, reason))
    assert not is_throttled(answer(403, "forbidden"))
    assert is_throttled(answer(429, ""))


@pytest.mark.cloud("gcp", errors=("authError", "resourceNotReady"))
def test_other_errors_are_retried() -> None:
    """Expired credentials, resources that are not ready. Read errors are never final and name their cause."""
    assert isinstance(failure(CREATE, answer(401, "authError")), TransientError)
    assert isinstance(failure(CREATE, answer(400, "resourceNotReady")), TransientError)
    read = failure("machineTypes.get", answer(403, "forbidden"))
    assert isinstance(read, TransientError)
    assert (denied_kind(read), denied_kind(TransientError("late"))) == ("permission", None)
    assert "compute.machineTypes.get" in str(read)
    assert isinstance(failure(CREATE, answer(403, "somethingNew")), LaunchRefused)


def operation(kind: str, *, at: str, is_done: bool = True, error: str | None = None) -> dict[str, Any]:
    """An operation on one instance."""
    told: dict[str, Any] = {
        "operationType": kind,
        "targetLink": f"{ZONE_URL}/instances/gpu-1",
        "insertTime": f"2026-11-21T{at}:00.000-08:00",
        "status": "DONE" if is_done else "RUNNING",
    }
    if is_done:
        told["endTime"] = f"2026-11-21T{at}:30.000-08:00"
    if error is not None:
        told["error"] = {"errors": [{"code": error, "message": "as told"}]}
    return told


def test_operations_report_deleted_instances() -> None:
    """Start, first termination, number of earlier failures; times are our clock's."""
    past = past_of(
        [
            operation("delete", at="04:00"),
            operation("compute.instances.preempted", at="03:59"),
            operation("setMetadata", at="02:00"),
            operation("insert", at="01:00"),
            operation("insert", at="00:59", error="ZONE_RESOURCE_POOL_EXHAUSTED"),
        ]
    )["gpu-1"]
    assert past.launched_at == datetime(2026, 11, 21, 9, tzinfo=UTC)
    assert past.ended_at == datetime(2026, 11, 21, 11, 59, 30, tzinfo=UTC)
    assert (past.is_ending, past.failed_count) == (True, 1)
    ending = past_of([operation("delete", at="04:00", is_done=False)])["gpu-1"]
    assert (ending.is_ending, ending.ended_at) == (True, None)


def sku(description: str, usd: float, unit: str = "h", usage: str = "OnDemand") -> dict[str, Any]:
    """A SKU of one region."""
    price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round(usd % 1 * 10**9)}
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": ["europe-west4"],
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": [{"unitPrice": price}]}}],
    }


SKUS = (
    sku("A2 Instance Core running in Netherlands", 0.03),
    sku("A2 Instance Ram running in Netherlands", 0.004, "GiBy.h"),
    sku("Nvidia Tesla A100 GPU running in Netherlands", 3.0),
    sku("Nvidia Tesla A100 80GB GPU running in Netherlands", 4.0),
    sku("Commitment v1: Nvidia Tesla A100 GPU running in Netherlands for 1 Year", 1.0),
    sku("Spot Preemptible A2 Instance Core running in Netherlands", 0.01, usage="Preemptible"),
)


def test_a_price_is_the_sum_of_its_parts() -> None:
    """Cores, memory and GPUs of the right size; if one part has no price, neither has the machine."""
    prices = {key: price for one in SKUS for key, price in part_of(one).items()}
    small, large = KNOWN_INSTANCE_TYPES["a2-highgpu-1g"], KNOWN_INSTANCE_TYPES["a2-ultragpu-1g"]
    on_demand = CapacityType.ON_DEMAND
    assert price_of(small, on_demand, "europe-west4", prices) == round((12 * 0.03 + 85 * 0.004 + 3.0) * 10**6)
    assert price_of(large, on_demand, "europe-west4", prices) == round((12 * 0.03 + 170 * 0.004 + 4.0) * 10**6)
    assert price_of(small, CapacityType.SPOT, "europe-west4", prices) is None
    assert price_of(small, on_demand, "us-east1", prices) is None


def test_the_capacity_history_gives_price_and_preemption_rate() -> None:
    """The newest price and the mean of the newest rates; a missing rate is unknown, not zero."""
    days = [{"startTime": f"2026-11-{day:02}T00:00:00Z"} for day in range(1, 21)]
    told = {
        "priceHistory": [
            {"interval": day, "listPrice": {"currencyCode": "USD", "units": "1", "nanos": number * 10**6}}
            for number, day in enumerate(days)
        ],
        "preemptionHistory": [{"interval": day, "preemptionRate": number / 100} for number, day in enumerate(days)],
    }
    spot = spot_of(told)
    assert spot.price_micro_usd_per_hour == 1_019_000
    assert spot.interruption_ratio == pytest.approx(0.16)
    assert spot_of({}).interruption_ratio is None
    assert spot_of({}).price_micro_usd_per_hour is None
