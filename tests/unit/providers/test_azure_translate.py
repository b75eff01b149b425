"""Translation of Azure sizes, errors, zones, machine names, prices and quotas."""

from datetime import UTC, datetime

import pytest

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.azure.market import Quota, price_of, quota_shortfall, zones_sold
from gpu_autoscaler.providers.azure.translate import (
    KNOWN_ERRORS,
    Denied,
    failure,
    instance_of,
    parse_instance_type,
    resource_id_of,
    zone_name,
    zones_of,
)
from gpu_autoscaler.providers.protocol import LaunchRefused

# GPU model, GPUs, memory of one in GiB.
CARRIES = {
    "Standard_NC4as_T4_v3": ("T4", 1, 16),
    "Standard_NC64as_T4_v3": ("T4", 4, 16),
    "Standard_NC6s_v3": ("V100", 1, 16),
    "Standard_NC24ads_A100_v4": ("A100", 1, 80),
    "Standard_ND96asr_v4": ("A100", 8, 40),
    "Standard_ND96amsr_A100_v4": ("A100", 8, 80),
    "Standard_ND96isr_H100_v5": ("H100", 8, 80),
    "Standard_ND96isr_H200_v5": ("H200", 8, 141),
    "Standard_NV36ads_A10_v5": ("A10", 1, 24),
}
REFUSALS = {
    "AllocationFailed": ("capacity", "offer"),
    "ZonalAllocationFailed": ("capacity", "offer"),
    "OverconstrainedAllocationRequest": ("capacity", "offer"),
    "OverconstrainedZonalAllocationRequest": ("capacity", "offer"),
    "SkuNotAvailable": ("capacity", "offer"),
    "NotAvailableForSubscription": ("capacity", "offer"),
    "MaxPriceTooLow": ("capacity", "offer"),
    "SubnetIsFull": ("capacity", "region"),
    "QuotaExceeded": ("quota", "region"),
    "AuthorizationFailed": ("permission", "region"),
    "LinkedAuthorizationFailed": ("permission", "region"),
    "RequestDisallowedByPolicy": ("permission", "region"),
    "ReadOnlyDisabledSubscription": ("permission", "region"),
    "MarketplacePurchaseEligibilityFailed": ("permission", "region"),
    "InvalidParameter": ("configuration", "offer"),
    "InvalidRequestContent": ("configuration", "offer"),
    "InvalidTagName": ("configuration", "offer"),
    "ImageNotFound": ("configuration", "offer"),
    "ResourceNotFound": ("configuration", "offer"),
    "ResourceGroupNotFound": ("configuration", "region"),
    "SubscriptionNotFound": ("configuration", "region"),
    "NotFound": ("configuration", "offer"),
    "BadRequest": ("configuration", "offer"),
    "PropertyChangeNotAllowed": ("configuration", "offer"),
    "LocationNotAvailableForResourceType": ("configuration", "region"),
}
PASSING = (
    "TooManyRequests",
    "Conflict",
    "AnotherOperationInProgress",
    "ConcurrentAllocationRequest",
    "PreconditionFailed",
    "an unknown error code",
)
CREDENTIALS = ("ExpiredAuthenticationToken", "InvalidAuthenticationToken", "AuthenticationFailed")
PUT = "VirtualMachines_CreateOrUpdate"
HEAD = "/subscriptions/s/resourceGroups/GPU/providers/Microsoft.Compute"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize("name", CARRIES)
def test_resources_of_a_size(name: str) -> None:
    """GPU model, GPU count and memory, under the names that Kubernetes uses."""
    kind = KNOWN_INSTANCE_TYPES[name]
    model, count, gibibytes = CARRIES[name]
    assert (kind.gpu_model, kind.resources.gpu_count, kind.gpu_memory_bytes) == (model, count, gibibytes * GIBIBYTE)


def told_sku(name: str, gpus: str = "1", family: str = "f", **more: str) -> dict[str, object]:
    """A size as the list of SKUs tells it."""
    capabilities = {"vCPUs": "4", "MemoryGB": "28", "GPUs": gpus} | more
    return {
        "name": name,
        "family": family,
        "capabilities": [{"name": key, "value": value} for key, value in capabilities.items()],
    }


def test_unsupported_sizes_are_not_offered() -> None:
    """AMD GPUs, a fraction of a GPU, and models that the name does not contain."""
    assert parse_instance_type(told_sku("Standard_ND96isr_MI300X_v5", "8")) is None
    assert parse_instance_type(told_sku("Standard_NV6ads_A10_v5", "0.1667")) is None
    assert parse_instance_type(told_sku("Standard_NC99_v9")) is None
    assert parse_instance_type(told_sku("Standard_D4s_v5", "0")) is None


def test_a_size_without_spot_is_recognized() -> None:
    """`LowPriorityCapable` is False."""
    kind = parse_instance_type(told_sku("Standard_NC4as_T4_v3", LowPriorityCapable="False"))
    assert kind is not None
    assert not kind.is_spot_sold


@pytest.mark.cloud("azure", errors=REFUSALS)
@pytest.mark.parametrize("code", REFUSALS)
def test_a_launch_refusal_has_its_kind(code: str) -> None:
    """The same code of a read call is not a refusal: the call is retried."""
    refused = failure(PUT, code, "words", of_launch=True)
    assert isinstance(refused, LaunchRefused)
    assert ((refused.kind, refused.scope), refused.code) == (REFUSALS[code], code)
    assert isinstance(failure("VirtualMachines_List", code, "words", of_launch=False), TransientError)


@pytest.mark.cloud("azure", errors=("OperationNotAllowed",))
def test_a_code_with_two_meanings_is_decided_by_its_message() -> None:
    """A used-up quota, or a setting that the size does not support."""
    quota = failure(PUT, "OperationNotAllowed", "exceeding approved Total Regional Cores quota", of_launch=True)
    other = failure(PUT, "OperationNotAllowed", "Premium disks are not allowed", of_launch=True)
    assert isinstance(quota, LaunchRefused)
    assert isinstance(other, LaunchRefused)
    assert (quota.kind, other.kind) == ("quota", "configuration")


@pytest.mark.cloud("azure", errors=PASSING)
@pytest.mark.parametrize("code", PASSING)
def test_temporary_errors_are_transient(code: str) -> None:
    """So are unknown codes: the name makes a retry safe."""
    assert isinstance(failure(PUT, code, "words", of_launch=True), TransientError)


@pytest.mark.cloud("azure", errors=CREDENTIALS)
@pytest.mark.parametrize("code", CREDENTIALS)
def test_credential_errors_are_not_refusals(code: str) -> None:
    """The message names the credentials and this machine's clock."""
    error = failure(PUT, code, "words", of_launch=True)
    assert type(error) is TransientError
    assert "check the credentials and this machine's clock" in str(error)


def test_every_known_error_is_tested() -> None:
    """The driver's tables and this file have the same codes."""
    tested = {*REFUSALS, *PASSING, *CREDENTIALS, "OperationNotAllowed"} - {"an unknown error code"}
    assert tested - {"InvalidTagName", "ImageNotFound"} == KNOWN_ERRORS


def test_a_denied_call_names_the_missing_permission() -> None:
    """Call, action and next step; a denied read is a separate error, because another source may replace it."""
    refused = failure(PUT, "AuthorizationFailed", "words", of_launch=True)
    denied = failure("ResourceSkus_List", "AuthorizationFailed", "words", of_launch=False)
    assert "Microsoft.Compute/virtualMachines/write" in str(refused)
    assert "doctor --policy" in str(refused)
    assert isinstance(denied, Denied)
    assert "Microsoft.Compute/skus/read" in str(denied)


def test_zones_have_the_names_of_node_labels() -> None:
    """Region and number; a region without zones has the name in its nodes' labels."""
    assert (zone_name("westeurope", ["2"]), zones_of("westeurope-2")) == ("westeurope-2", ["2"])
    assert (zone_name("westus", []), zones_of("0")) == ("0", [])


def test_an_azure_machine_becomes_an_instance() -> None:
    """Tags in any case, the resource group in lower case, and our state names."""
    told = {
        "id": f"{HEAD}/virtualMachines/gpu-1",
        "location": "westeurope",
        "zones": ["1"],
        "tags": {"GPU-Autoscaler.io_Action-Id": "a1", "gpu-autoscaler.io_price-micro-usd-per-hour": "500"},
        "properties": {
            "hardwareProfile": {"vmSize": "Standard_NC4as_T4_v3"},
            "priority": "Spot",
            "provisioningState": "Creating",
            "timeCreated": "2026-11-21T11:59:00Z",
        },
    }
    made = instance_of(told, now=NOW)
    assert (
        made.provider_id
        == "azure:///subscriptions/s/resourceGroups/gpu/providers/Microsoft.Compute/virtualMachines/gpu-1"
    )
    assert (made.action_id, made.state, made.zone) == ("a1", "pending", "westeurope-1")
    assert (made.capacity_type, made.price_micro_usd_per_hour) == (CapacityType.SPOT, 500)


def test_a_machine_with_failed_provisioning_is_running() -> None:
    """Azure reports Failed when an extension failed; the machine may have pods."""
    told = {
        "id": f"{HEAD}/virtualMachines/gpu-1",
        "location": "westeurope",
        "properties": {"hardwareProfile": {"vmSize": "x"}, "provisioningState": "Failed"},
    }
    assert instance_of(told, now=NOW).state == "running"


def test_instances_of_other_clouds_are_ignored() -> None:
    """They are recognized by their provider ID."""
    with pytest.raises(PermanentError, match="is not an instance of"):
        resource_id_of(ProviderId("aws:///eu-west-1a/i-1"))


def price(**changes: object) -> dict[str, object]:
    """An item of the price list."""
    return {
        "armSkuName": "Standard_NC4as_T4_v3",
        "skuName": "NC4as T4 v3",
        "productName": "Virtual Machines NCasT4 v3 Series",
        "unitOfMeasure": "1 Hour",
        "currencyCode": "USD",
        "retailPrice": 0.526,
    } | changes


def test_only_hourly_linux_prices_are_used() -> None:
    """On-demand and spot; Windows, low priority and zero prices are skipped."""
    assert price_of(price()) == (("Standard_NC4as_T4_v3", CapacityType.ON_DEMAND), 526_000)
    assert price_of(price(skuName="NC4as T4 v3 Spot")) == (("Standard_NC4as_T4_v3", CapacityType.SPOT), 526_000)
    assert price_of(price(skuName="NC4as T4 v3 Low Priority")) is None
    assert price_of(price(productName="Virtual Machines NCasT4 v3 Series Windows")) is None
    assert price_of(price(unitOfMeasure="1/Month")) is None
    assert price_of(price(retailPrice=0.0)) is None


def test_restrictions_remove_zones_or_the_whole_region() -> None:
    """A size that the subscription cannot use is not offered."""
    place = {"locationInfo": [{"location": "westeurope", "zones": ["1", "2", "3"]}]}
    in_zone = {"type": "Zone", "restrictionInfo": {"zones": ["3"]}}
    everywhere = {"type": "Location", "restrictionInfo": {"locations": ["westeurope"]}}
    assert zones_sold(place | {"restrictions": [in_zone]}, "westeurope") == {"westeurope-1", "westeurope-2", "0"}
    assert zones_sold(place | {"restrictions": [everywhere]}, "westeurope") == frozenset()


def test_quotas_per_family_and_region_and_one_for_spot() -> None:
    """A quota that is not listed does not limit."""
    kind = KNOWN_INSTANCE_TYPES["Standard_NC4as_T4_v3"]
    family = kind.family.lower()
    assert quota_shortfall(kind, CapacityType.ON_DEMAND, {}) is None
    assert f"quota {family} is 0 vCPUs" in str(quota_shortfall(kind, CapacityType.ON_DEMAND, {family: Quota(0, 0)}))
    assert "with 8 in use" in str(quota_shortfall(kind, CapacityType.ON_DEMAND, {"cores": Quota(10, 8)}))
    assert quota_shortfall(kind, CapacityType.SPOT, {family: Quota(0, 0), "lowprioritycores": Quota(4, 0)}) is None
