"""Translation of AWS errors, instances and instance types. The only module that knows AWS's formats.

Sources: EC2 API Reference, "Error codes" and the structures `Instance`, `InstanceTypeInfo`; karpenter-provider-aws,
pkg/errors (codes for insufficient capacity); read 2026-11-21.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL, PREFIX
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.allocatable import machine_resources
from gpu_autoscaler.providers.aws.permissions import actions_of
from gpu_autoscaler.providers.market import MachineKind
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope

PROVIDER_ID_PREFIX = "aws:///"
PRICE = f"{PREFIX}/price-micro-usd-per-hour"  # on instances: the agreed price, which no call returns later
TRANSACTION = f"{PREFIX}/transaction"  # on instances of a fleet: its token
ORDERS = f"{PREFIX}/orders-"  # with a number: sorted action ids of the whole transaction
GROUP_TAG = "aws:autoscaling:groupName"  # set by Auto Scaling on every instance of a group
THROTTLED_SECONDS = 5.0

_REFUSED: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
    "InsufficientInstanceCapacity": ("capacity", "offer"),
    "InsufficientHostCapacity": ("capacity", "offer"),
    "UnfulfillableCapacity": ("capacity", "offer"),
    "ReservationCapacityExceeded": ("capacity", "offer"),
    "SpotMaxPriceTooLow": ("capacity", "offer"),
    "Unsupported": ("capacity", "offer"),
    "InsufficientFreeAddressesInSubnet": ("capacity", "zone"),
    "VcpuLimitExceeded": ("quota", "region"),
    "InstanceLimitExceeded": ("quota", "region"),
    "MaxSpotInstanceCountExceeded": ("quota", "region"),
    "MaxFleetCountExceeded": ("quota", "region"),
    "UnauthorizedOperation": ("permission", "region"),
    "AccessDenied": ("permission", "region"),
    "AccessDeniedException": ("permission", "region"),
    # The account's first spot instance needs a role that somebody has to make once (EC2 User Guide,
    # "Service-linked role for Spot Instance requests", read 2026-11-21).
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": ("permission", "region"),
    "OptInRequired": ("permission", "region"),
    "PendingVerification": ("permission", "region"),
    "MissingParameter": ("configuration", "offer"),
    "ValidationError": ("configuration", "offer"),
}
# Groups report failed launches as a sentence that contains the code, or these words. Source: EC2 Auto Scaling User
# Guide, "Troubleshoot issues in Amazon EC2 Auto Scaling", and cortexlabs/cortex, issue 1258 (read 2026-11-22).
_CODE_BY_PHRASE: Mapping[str, str] = {
    "do not have sufficient": "InsufficientInstanceCapacity",
    "no spot capacity": "InsufficientInstanceCapacity",
    "spot instance count exceeded": "MaxSpotInstanceCountExceeded",
    "vcpu": "VcpuLimitExceeded",
    "not authorized": "UnauthorizedOperation",
    "not supported in your requested availability zone": "Unsupported",
}
_CODE = re.compile(r"\b([A-Z][A-Za-z]+(?:\.[A-Za-z]+)*) - ")
_INVALID: tuple[RefusalKind, RefusalScope] = ("configuration", "offer")  # InvalidSubnetID.NotFound and its kin
_THROTTLED = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "EC2ThrottledException", "TooManyRequestsException"}
)
_CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_CONTENTION = frozenset({"ResourceContention", "ScalingActivityInProgress", "IdempotentCallInProgress"})
# Codes with a meaning of their own; all others are transient.
KNOWN_ERRORS = frozenset(_REFUSED) | _THROTTLED | _CREDENTIALS | _CONTENTION
_STATES: Mapping[str, InstanceState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "terminating",
    "terminated": "terminated",
    # Our instances never stop; an instance stopped by somebody still exists and costs its disks.
    "stopping": "running",
    "stopped": "running",
}
_DATED = re.compile(r"\((\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}) (?:GMT|UTC)\)")
# Memory of an instance type that its operating system does not see (karpenter-provider-aws,
# `VM_MEMORY_OVERHEAD_PERCENT`).
_MEMORY_UNSEEN_RATIO = 0.075
_MEBIBYTE = 2**20


def is_throttled(code: str) -> bool:
    """Return whether the code means throttling."""
    return code in _THROTTLED


def failure(operation: str, code: str, message: str, *, of_launch: bool) -> AutoscalerError:
    """Return our error for a refused call. Refusals of reads are never final: reads are retried."""
    if code in _THROTTLED or code in _CONTENTION:
        return TransientError(f"{operation}: {code}: {message}", retry_after_seconds=THROTTLED_SECONDS)
    if code in _CREDENTIALS:
        return TransientError(f"{operation}: {code}: {message}; check the credentials and this machine's clock")
    if code in {"IdempotentParameterMismatch", "IdempotentParameterMismatchError"}:
        return PermanentError(f"{operation}: {code}: {message}; the token was already used for another request")
    refused = _REFUSED.get(code) or (_INVALID if code.startswith("Invalid") else None)
    if refused is None:
        return TransientError(f"{operation}: {code}: {message}; safe to retry")
    kind, scope = refused
    text = f"{code}: {message}"
    if kind == "permission":
        text += f"; allow {', '.join(actions_of(operation))} (`gpu-autoscaler doctor --policy` prints the whole policy)"
    elif kind == "configuration":
        text += "; check launch template, subnets and groups in the settings under [aws]"
    if of_launch:
        return LaunchRefused(f"{operation}: {text}", code=code, kind=kind, scope=scope)
    return TransientError(f"{operation}: {text}")


def is_denied(exc: AutoscalerError) -> bool:
    """Return whether the call fails until its permission is granted."""
    return code_of(exc) in {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}


def is_answered(exc: TransientError) -> bool:
    """Return whether the cloud gave a reason that stays: no permission, or no such object."""
    return code_of(exc) in _REFUSED or code_of(exc).startswith("Invalid")


def code_of(exc: AutoscalerError) -> str:
    """Return AWS's code of the error behind ours; empty if it is not AWS's."""
    return str(error_in(exc.__cause__).get("Code", ""))


def error_in(exc: BaseException | None) -> Mapping[str, Any]:
    """Return code and message of botocore's error; empty for any other."""
    error: Mapping[str, Any] = getattr(exc, "response", {}).get("Error", {})
    return error


def code_in_message(message: str) -> str:
    """Return EC2's code for a group's message about a failed launch; `ValidationError` if unknown. An unknown failure
    needs an operator: the message says why, and the group would retry in vain."""
    for code in _CODE.findall(message):
        if code in _REFUSED or code.startswith("Invalid"):
            return str(code)
    lower = message.lower()
    return next((code for phrase, code in _CODE_BY_PHRASE.items() if phrase in lower), "ValidationError")


def provider_id_of(zone: str, instance_id: str) -> ProviderId:
    """Return the provider id of an instance in Kubernetes: `aws:///eu-west-1a/i-0abc`."""
    return ProviderId(f"{PROVIDER_ID_PREFIX}{zone}/{instance_id}")


def instance_id_of(provider_id: ProviderId) -> str:
    """Return EC2's id in `aws:///eu-west-1a/i-0abc`. Raises PermanentError for another cloud's id."""
    if not provider_id.startswith(PROVIDER_ID_PREFIX):
        raise PermanentError(
            f"{provider_id} is not an instance of this cloud ({PROVIDER_ID_PREFIX}...): left untouched"
        )
    return provider_id.rpartition("/")[2]


def zone_of(provider_id: ProviderId) -> str:
    """Return the zone in `aws:///eu-west-1a/i-0abc`. Raises PermanentError for another cloud's id."""
    instance_id_of(provider_id)
    return provider_id.removeprefix(PROVIDER_ID_PREFIX).partition("/")[0]


def tags_of(order: Order) -> list[dict[str, str]]:
    """Return the tags that identify an instance as ours and as the order's."""
    return tags_for(order.installation, order.action_id, order.pool, order.offer.price_micro_usd_per_hour)


def tags_for(installation: str, action_id: ActionId, pool: str, price: int | None) -> list[dict[str, str]]:
    """Return the same tags, from the remaining data of an order."""
    tags = {INSTALLATION: installation, ACTION_ID: action_id, POOL: pool, "Name": f"gpu-autoscaler {pool}"}
    if price is not None:
        tags[PRICE] = str(price)
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def read_tags(data: Mapping[str, Any]) -> dict[str, str]:
    """Return an instance's tags by key."""
    return {tag["Key"]: tag["Value"] for tag in data.get("Tags", ())}


def instance_of(data: Mapping[str, Any], *, now: datetime) -> Instance:
    """Return the instance that EC2 describes. An end without a date is dated `now`."""
    tags, zone = read_tags(data), data["Placement"]["AvailabilityZone"]
    state = _STATES[data["State"]["Name"]]
    price = tags.get(PRICE, "")
    action_id = tags.get(ACTION_ID)
    return Instance(
        provider_id=provider_id_of(zone, data["InstanceId"]),
        action_id=None if action_id is None else ActionId(action_id),
        state=state,
        instance_type=data["InstanceType"],
        zone=zone,
        capacity_type=_capacity_type_of(data),
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=data["LaunchTime"].astimezone(UTC),
        terminated_at=_ended_at(data, now) if state == "terminated" else None,
    )


def _capacity_type_of(data: Mapping[str, Any]) -> CapacityType:
    """An instance is reserved if it targets a reservation: open ones also absorb instances that do not."""
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    if data.get("InstanceLifecycle") == "capacity-block" or target.get("CapacityReservationId"):
        return CapacityType.RESERVED
    return CapacityType.SPOT if data.get("InstanceLifecycle") == "spot" else CapacityType.ON_DEMAND


def _ended_at(data: Mapping[str, Any], now: datetime) -> datetime:
    """EC2 dates only terminations requested by users: `User initiated (2026-11-21 12:00:00 GMT)`."""
    dated = _DATED.search(data.get("StateTransitionReason", ""))
    return now if dated is None else datetime.strptime(dated[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


class InstanceType(MachineKind, frozen=True, kw_only=True):
    """An instance type with its purchase options."""

    capacity_types: tuple[CapacityType, ...] = (CapacityType.ON_DEMAND, CapacityType.SPOT)


def parse_instance_type(data: Mapping[str, Any]) -> InstanceType | None:
    """Return the instance type that EC2 describes; None for GPUs of other vendors, which our pods cannot use."""
    gpus = data.get("GpuInfo", {}).get("Gpus", ())
    if any(gpu.get("Manufacturer", "").upper() != "NVIDIA" for gpu in gpus):
        return None
    classes = data.get("SupportedUsageClasses", ("on-demand",))
    return build_instance_type(
        data["InstanceType"],
        vcpu_count=data["VCpuInfo"]["DefaultVCpus"],
        memory_mib=data["MemoryInfo"]["SizeInMiB"],
        gpu_count=sum(gpu["Count"] for gpu in gpus),
        gpu_name=gpus[0]["Name"] if gpus else None,
        gpu_memory_mib=gpus[0]["MemoryInfo"]["SizeInMiB"] if gpus else None,
        capacity_types=tuple(kind for kind in (CapacityType.ON_DEMAND, CapacityType.SPOT) if kind.value in classes),
    )


def build_instance_type(
    name: str,
    *,
    vcpu_count: int,
    memory_mib: int,
    gpu_count: int = 0,
    gpu_name: str | None = None,
    gpu_memory_mib: int | None = None,
    capacity_types: tuple[CapacityType, ...] = (CapacityType.ON_DEMAND, CapacityType.SPOT),
) -> InstanceType:
    """Return the instance type with its allocatable resources; unknown GPU models keep the cloud's name."""
    model = None if gpu_name is None else gpu_model_name(gpu_name) or gpu_name
    # AWS reports some GPUs in decimal gigabytes: 16 GiB for a T4, 22,888 MiB for a 24 GB L4. We use the nominal size.
    nominal = GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None
    reported_bytes = None if gpu_memory_mib is None else gpu_memory_mib * _MEBIBYTE
    return InstanceType(
        name=name,
        resources=machine_resources(vcpu_count, memory_mib * _MEBIBYTE * (1 - _MEMORY_UNSEEN_RATIO), gpu_count),
        gpu_model=model,
        gpu_memory_bytes=nominal or reported_bytes,
        capacity_types=capacity_types,
        vcpu_count=vcpu_count,
    )
