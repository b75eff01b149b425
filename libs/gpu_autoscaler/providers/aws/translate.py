"""AWS's words into ours: errors, instances, instance types. The only place that knows them.

Sources: EC2 API Reference, "Error codes" and the structures `Instance`, `InstanceTypeInfo`; karpenter-provider-aws,
pkg/errors (which codes mean that there is no capacity); read 2026-11-21.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.gpu import GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL, PREFIX
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.allocatable import PODS_PER_NODE, allocatable
from gpu_autoscaler.providers.aws.permissions import actions_of
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope

PROVIDER_ID_PREFIX = "aws:///"
PRICE = f"{PREFIX}/price-micro-usd-per-hour"  # on instances: what was agreed, as no call tells it afterwards
TRANSACTION = f"{PREFIX}/transaction"  # on instances of a fleet: with which others they were made, as its token
ORDERS = f"{PREFIX}/orders-"  # with a number: the action ids of all that were made with them, sorted
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
# What a group says of a launch that went wrong is a sentence, in which the word may stand, or these. Source: EC2 Auto
# Scaling User Guide, "Troubleshoot issues in Amazon EC2 Auto Scaling", and cortexlabs/cortex, report 1258 (read
# 2026-11-22).
_SAID: Mapping[str, str] = {
    "do not have sufficient": "InsufficientInstanceCapacity",
    "no spot capacity": "InsufficientInstanceCapacity",
    "spot instance count exceeded": "MaxSpotInstanceCountExceeded",
    "vcpu": "VcpuLimitExceeded",
    "not authorized": "UnauthorizedOperation",
    "not supported in your requested availability zone": "Unsupported",
}
_WORD = re.compile(r"\b([A-Z][A-Za-z]+(?:\.[A-Za-z]+)*) - ")
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
# Every word that has a meaning of its own here; any other is one of a passing error, and asked again.
KNOWN_ERRORS = frozenset(_REFUSED) | _THROTTLED | _CREDENTIALS | _CONTENTION
_STATES: Mapping[str, InstanceState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "terminating",
    "terminated": "terminated",
    # One-time requests and our own never stop; an instance that somebody stopped still is one, and costs its disks.
    "stopping": "running",
    "stopped": "running",
}
_DATED = re.compile(r"\((\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}) (?:GMT|UTC)\)")
# Memory that a machine is sold with and its system does not see (karpenter-provider-aws, `VM_MEMORY_OVERHEAD_PERCENT`).
_MEMORY_UNSEEN_RATIO = 0.075
_MEBIBYTE = 2**20
_DISK_BYTES = 100 * 2**30  # of the launch template where the type has none of its own; S64 asks for 100 GiB


def is_throttled(code: str) -> bool:
    """True for words that mean: too often."""
    return code in _THROTTLED


def failure(operation: str, code: str, message: str, *, of_launch: bool) -> AutoscalerError:
    """Return our error for a refused call. Of reads nothing is final: what they tell is asked for again."""
    if code in _THROTTLED or code in _CONTENTION:
        return TransientError(f"{operation}: {code}: {message}", retry_after_seconds=THROTTLED_SECONDS)
    if code in _CREDENTIALS:
        return TransientError(
            f"{operation}: {code}: {message}; see that the credentials are valid, and this machine's clock is right"
        )
    if code in {"IdempotentParameterMismatch", "IdempotentParameterMismatchError"}:
        return PermanentError(f"{operation}: {code}: {message}; the token has bought something else already")
    refused = _REFUSED.get(code) or (_INVALID if code.startswith("Invalid") else None)
    if refused is None:
        return TransientError(f"{operation}: {code}: {message}; the same call may be made again")
    kind, scope = refused
    said = f"{code}: {message}"
    if kind == "permission":
        said += f"; allow {', '.join(actions_of(operation))} (`gpu-autoscaler doctor` prints the whole policy)"
    elif kind == "configuration":
        said += "; see launch template, subnets and groups in the settings under [aws]"
    if of_launch:
        return LaunchRefused(f"{operation}: {said}", code=code, kind=kind, scope=scope)
    return TransientError(f"{operation}: {said}")


def is_denied(exc: TransientError) -> bool:
    """True where asking again changes nothing until somebody allows the call."""
    return _code_of(exc) in {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}


def is_answered(exc: TransientError) -> bool:
    """True where the cloud has said why it does not tell: by right, or as there is nothing of that name."""
    return _code_of(exc) in _REFUSED or _code_of(exc).startswith("Invalid")


def _code_of(exc: TransientError) -> str:
    return str(getattr(exc.__cause__, "response", {}).get("Error", {}).get("Code", ""))


def code_said(sentence: str) -> str:
    """Return EC2's word for what a group says of a failed launch; `ValidationError` where nobody knows it.

    That is for somebody to look at: the sentence says what, and the group would go on trying in vain.
    """
    for word in _WORD.findall(sentence):
        if word in _REFUSED or word.startswith("Invalid"):
            return str(word)
    lower = sentence.lower()
    return next((code for words, code in _SAID.items() if words in lower), "ValidationError")


def provider_id_of(zone: str, instance_id: str) -> ProviderId:
    """Return the name by which Kubernetes knows an instance: `aws:///eu-west-1a/i-0abc`."""
    return ProviderId(f"{PROVIDER_ID_PREFIX}{zone}/{instance_id}")


def instance_id_of(provider_id: ProviderId) -> str:
    """Return EC2's id in `aws:///eu-west-1a/i-0abc`. Raises PermanentError for the name of another cloud."""
    if not provider_id.startswith(PROVIDER_ID_PREFIX):
        raise PermanentError(f"{provider_id} is no instance of this cloud ({PROVIDER_ID_PREFIX}...): left alone")
    return provider_id.rpartition("/")[2]


def zone_of(provider_id: ProviderId) -> str:
    """Return the zone in `aws:///eu-west-1a/i-0abc`. Raises PermanentError for the name of another cloud."""
    instance_id_of(provider_id)
    return provider_id.removeprefix(PROVIDER_ID_PREFIX).partition("/")[0]


def tags_of(order: Order) -> list[dict[str, str]]:
    """Return what an instance carries so that it can be known again as ours, and as this order's."""
    return tags_for(order.installation, order.action_id, order.pool, order.offer.price_micro_usd_per_hour)


def tags_for(installation: str, action_id: ActionId, pool: str, price: int | None) -> list[dict[str, str]]:
    """Return the same where no more is left of the order than this."""
    tags = {INSTALLATION: installation, ACTION_ID: action_id, POOL: pool, "Name": f"gpu-autoscaler {pool}"}
    if price is not None:
        tags[PRICE] = str(price)
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def read_tags(told: Mapping[str, Any]) -> dict[str, str]:
    """Return an instance's tags by key."""
    return {tag["Key"]: tag["Value"] for tag in told.get("Tags", ())}


def instance_of(told: Mapping[str, Any], *, now: datetime) -> Instance:
    """Return what EC2 tells of an instance. An end without a date is dated `now`, when it is first seen."""
    tags, zone = read_tags(told), told["Placement"]["AvailabilityZone"]
    state = _STATES[told["State"]["Name"]]
    price = tags.get(PRICE, "")
    action_id = tags.get(ACTION_ID)
    return Instance(
        provider_id=provider_id_of(zone, told["InstanceId"]),
        action_id=None if action_id is None else ActionId(action_id),
        state=state,
        instance_type=told["InstanceType"],
        zone=zone,
        capacity_type=_capacity_type_of(told),
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=told["LaunchTime"].astimezone(UTC),
        terminated_at=_ended_at(told, now) if state == "terminated" else None,
    )


def _capacity_type_of(told: Mapping[str, Any]) -> CapacityType:
    """Reserved is what names its reservation: an open one takes instances that did not ask for it as well."""
    target = told.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    if told.get("InstanceLifecycle") == "capacity-block" or target.get("CapacityReservationId"):
        return CapacityType.RESERVED
    return CapacityType.SPOT if told.get("InstanceLifecycle") == "spot" else CapacityType.ON_DEMAND


def _ended_at(told: Mapping[str, Any], now: datetime) -> datetime:
    """EC2 dates only the ends that users ask for: `User initiated (2026-11-21 12:00:00 GMT)`."""
    dated = _DATED.search(told.get("StateTransitionReason", ""))
    return now if dated is None else datetime.strptime(dated[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """An instance type: what pods get of it, its GPUs, and how it may be bought."""

    name: str
    resources: Resources
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None
    capacity_types: tuple[CapacityType, ...] = (CapacityType.ON_DEMAND, CapacityType.SPOT)
    vcpu_count: int = 0  # as quotas count them


def kind_of(told: Mapping[str, Any]) -> Kind | None:
    """Return what EC2 tells of an instance type; None for GPUs that are not NVIDIA's, which our pods cannot use."""
    gpus = told.get("GpuInfo", {}).get("Gpus", ())
    if any(gpu.get("Manufacturer", "").upper() != "NVIDIA" for gpu in gpus):
        return None
    classes = told.get("SupportedUsageClasses", ("on-demand",))
    return build_instance_type(
        told["InstanceType"],
        vcpu_count=told["VCpuInfo"]["DefaultVCpus"],
        memory_mib=told["MemoryInfo"]["SizeInMiB"],
        gpu_count=sum(gpu["Count"] for gpu in gpus),
        gpu_name=gpus[0]["Name"] if gpus else None,
        gpu_memory_mib=gpus[0]["MemoryInfo"]["SizeInMiB"] if gpus else None,
        capacity_types=tuple(one for one in (CapacityType.ON_DEMAND, CapacityType.SPOT) if one.value in classes),
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
) -> Kind:
    """Return the type with what is left of it for pods; a GPU that we have no name for keeps the cloud's."""
    whole = Resources(
        cpu_milli=vcpu_count * 1000,
        memory_bytes=int(memory_mib * _MEBIBYTE * (1 - _MEMORY_UNSEEN_RATIO)),
        gpu_count=gpu_count,
        ephemeral_storage_bytes=_DISK_BYTES,
        pod_count=PODS_PER_NODE,
    )
    model = None if gpu_name is None else gpu_model_name(gpu_name) or gpu_name
    # AWS counts some GPUs in decimal gigabytes: a T4 has 16 GiB there, an L4 of "24 GB" 22,888 MiB. Ours is one size.
    nominal = GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None
    told_bytes = None if gpu_memory_mib is None else gpu_memory_mib * _MEBIBYTE
    return Kind(
        name=name,
        resources=allocatable(whole),
        gpu_model=model,
        gpu_memory_bytes=nominal or told_bytes,
        capacity_types=capacity_types,
        vcpu_count=vcpu_count,
    )
