"""Translation of Google Cloud errors, instances and machine types. The only module that knows Google's formats.

Sources: Compute Engine API v1 (discovery document of 2026-11-06): `Instance`, `ManagedInstance`, `Operation`,
`MachineType`; cluster-autoscaler, cloudprovider/gce/autoscaling_gce_client.go (codes for insufficient capacity and
quota); Compute Engine, "Troubleshooting resource availability errors"; read 2026-11-21.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, GPU_TABLE, Accelerator, GpuModel, gpu_model_name, gpu_sizes
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.allocatable import machine_resources
from gpu_autoscaler.providers.gcp.permissions import REQUESTS, permissions_of
from gpu_autoscaler.providers.market import MachineKind
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope
from gpu_autoscaler.providers.rest import Answer, error_text
from gpu_autoscaler.providers.tokens import idempotency_token

PROVIDER_ID_PREFIX = "gce://"
# Calls that launch: their refusals are final.
LAUNCHES = ("instanceGroupManagers.createInstances", f"{REQUESTS}.insert")
THROTTLED_SECONDS = 5.0
# Metadata keys of our instances: dots and slashes are not allowed, so they differ from our labels.
INSTALLATION, ACTION_ID, POOL = "gpu-autoscaler-installation", "gpu-autoscaler-action-id", "gpu-autoscaler-pool"
PRICE = "gpu-autoscaler-price-micro-usd-per-hour"  # the agreed price, which no call returns later
NODE_LABELS, NODE_TAINTS = (
    "gpu-autoscaler-node-labels",
    "gpu-autoscaler-node-taints",
)  # in the syntax of kubelet flags
CREATED_BY = "created-by"  # set by managed groups on all their instances

_REFUSED: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": ("capacity", "offer"),
    "REGION_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "INSUFFICIENT_CAPACITY": ("capacity", "offer"),
    "RESERVATION_CAPACITY_EXCEEDED": ("capacity", "offer"),
    "RESERVATION_NOT_READY": ("capacity", "offer"),
    "UNSUPPORTED_OPERATION": ("capacity", "offer"),
    "RESIZE_REQUEST_TIMED_OUT": ("capacity", "offer"),  # our own: a resize request was not met in time
    "IP_SPACE_EXHAUSTED": ("capacity", "zone"),
    "IP_SPACE_EXHAUSTED_WITH_DETAILS": ("capacity", "zone"),
    "QUOTA_EXCEEDED": ("quota", "region"),
    "quotaExceeded": ("quota", "region"),
    "PERMISSIONS_ERROR": ("permission", "region"),
    "forbidden": ("permission", "region"),
    "accessNotConfigured": ("permission", "region"),
}
_OTHER: tuple[RefusalKind, RefusalScope] = ("configuration", "offer")  # VM_EXTERNAL_IP_ACCESS_POLICY_CONSTRAINT ...
# Errors that a group retries by itself soon: not a refusal.
_PASSING = frozenset(
    {"RATE_LIMIT_EXCEEDED", "RESOURCE_OPERATION_RATE_EXCEEDED", "INTERNAL_ERROR", "BACKEND_ERROR", "RESOURCE_NOT_READY"}
)
_THROTTLED = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"})
KNOWN_ERRORS = frozenset({*_REFUSED, *_PASSING, *_THROTTLED, "authError", "resourceNotReady"})
_STATES: Mapping[str, InstanceState] = {
    "PENDING": "pending",
    "PROVISIONING": "pending",
    "STAGING": "pending",
    "RUNNING": "running",
    "REPAIRING": "running",
    # Our instances are never suspended; one suspended by somebody still exists and costs memory and disks.
    "SUSPENDING": "running",
    "SUSPENDED": "running",
    "PENDING_STOP": "terminating",
    "STOPPING": "terminating",
    "DEPROVISIONING": "terminating",
    # Preempted or stopped: it is not started again.
    "STOPPED": "terminated",
    "TERMINATED": "terminated",
}
_ENDS = frozenset({"delete", "compute.instances.preempted", "compute.instances.hostError"})
_MEBIBYTE = 2**20
_MEMORY_UNSEEN_RATIO = 0.06  # our own figure: memory of a machine type that its operating system does not see
_GPU_SIZE = re.compile(r"(\d+)gb")


# ---- errors


def reason_of(answer: Answer) -> str:
    """Return the cloud's error code."""
    error = answer.body.get("error", {}) if isinstance(answer.body, dict) else {}
    errors = error.get("errors", ()) if isinstance(error, dict) else ()
    return str(errors[0].get("reason", "")) if errors else str(error.get("status", "")) if error else ""


def is_throttled(answer: Answer) -> bool:
    """Return whether the answer means throttling; some such answers are a 403."""
    return answer.status == 429 or (answer.status == 403 and reason_of(answer) in _THROTTLED)


def failure(operation: str, answer: Answer) -> AutoscalerError:
    """Return our error for a refused call. Refusals of reads are never final: reads are retried."""
    reason = reason_of(answer) or f"HTTP {answer.status}"
    text = f"{reason}: {error_text(answer)}"
    if answer.status == 401:
        return TransientError(f"{operation}: {text}; check the credentials and this machine's clock")
    if answer.status in (408, 409, 412) and operation not in LAUNCHES:
        return TransientError(f"{operation}: {text}; safe to retry")
    if reason == "resourceNotReady":
        return TransientError(f"{operation}: {text}; safe to retry")
    if answer.status == 403 and reason not in _REFUSED:
        reason = "forbidden"
    refused = refusal(operation, reason, text)
    if operation in LAUNCHES:
        return refused
    retried = TransientError(str(refused))
    retried.__cause__ = refused
    return retried


def denied_kind(exc: AutoscalerError) -> RefusalKind | None:
    """Return the kind of a failure that persists until somebody changes something; None for transient ones."""
    refused = exc if isinstance(exc, LaunchRefused) else exc.__cause__
    return refused.kind if isinstance(refused, LaunchRefused) else None


def is_passing(code: str) -> bool:
    """Return whether the group retries this launch error by itself."""
    return code in _PASSING


def refusal(operation: str, code: str, text: str) -> LaunchRefused:
    """Return the refusal for the cloud's code."""
    kind, scope = _REFUSED.get(code, _OTHER)
    if code == "accessNotConfigured":
        text += "; enable the API in this project"
    elif kind == "permission":
        text += (
            f"; allow {', '.join(permissions_of(operation))} (`gpu-autoscaler doctor --policy` prints the whole role)"
        )
    elif kind == "configuration":
        text += "; check project, zones and groups in the settings under [gcp], and the group's template"
    return LaunchRefused(f"{operation}: {text}", code=code, kind=kind, scope=scope)


def first_error(errors: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return code and message of the first error of an operation or attempt; None without errors."""
    for error in (errors or {}).get("errors", ()):
        return str(error.get("code", "")), str(error.get("message", ""))
    return None


# ---- names


def owner_prefix(installation: str) -> str:
    """Return the prefix of an installation's instance names."""
    return f"gpu-{_digest(installation, 8)}-"


def token_prefix(installation: str, action_id: ActionId) -> str:
    """Return the name prefix of the order's instance, in whichever group."""
    return f"{owner_prefix(installation)}{idempotency_token(installation, action_id)}-"


def group_suffix(zone: str, name: str) -> str:
    """Return the suffix of a group's instance names, so that deleted instances still tell their group."""
    return _digest(f"{zone}/{name}", 6)


def instance_name(order: Order, group_zone: str, group_name: str) -> str:
    """Return the order's only possible instance name in this group: a group takes each name once."""
    return token_prefix(order.installation, order.action_id) + group_suffix(group_zone, group_name)


def provider_id_of(project: str, zone: str, name: str) -> ProviderId:
    """Return the provider id of a node in Kubernetes: `gce://project/zone/name`."""
    return ProviderId(f"{PROVIDER_ID_PREFIX}{project}/{zone}/{name}")


def parse_provider_id(provider_id: ProviderId, project: str) -> tuple[str, str]:
    """Return zone and name. Raises PermanentError for the id of another cloud or project."""
    parts = provider_id.removeprefix(PROVIDER_ID_PREFIX).split("/")
    if not provider_id.startswith(PROVIDER_ID_PREFIX) or len(parts) != 3 or parts[0] != project:
        raise PermanentError(
            f"{provider_id} is not an instance of this cloud ({PROVIDER_ID_PREFIX}{project}/...): left untouched"
        )
    return parts[1], parts[2]


def last_of(url: str) -> str:
    """Return the name at the end of a resource URL."""
    return url.rpartition("/")[2]


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


# ---- instances


def metadata_for(order: Order) -> dict[str, str]:
    """Return the metadata that identifies an instance as ours and as the order's, with its node's labels."""
    metadata = {
        INSTALLATION: order.installation,
        ACTION_ID: order.action_id,
        POOL: order.pool,
        NODE_LABELS: ",".join(f"{key}={value}" for key, value in order.labels),
        NODE_TAINTS: ",".join(f"{taint.key}={taint.value or ''}:{taint.effect}" for taint in order.taints),
    }
    if order.offer.price_micro_usd_per_hour is not None:
        metadata[PRICE] = str(order.offer.price_micro_usd_per_hour)
    return metadata


def read_metadata(data: Mapping[str, Any]) -> dict[str, str]:
    """Return an instance's metadata by key."""
    return {item["key"]: item.get("value", "") for item in data.get("metadata", {}).get("items", ())}


def capacity_type_of(properties: Mapping[str, Any]) -> CapacityType:
    """Return the purchase option of an instance or template."""
    scheduling = properties.get("scheduling", {})
    model = scheduling.get("provisioningModel")
    if model == "SPOT" or scheduling.get("preemptible"):
        return CapacityType.SPOT
    return CapacityType.ON_DEMAND if reservation_of(properties) is None else CapacityType.RESERVED


def reservation_of(properties: Mapping[str, Any]) -> str | None:
    """Return the reservation that is targeted exclusively, None if there is none."""
    affinity = properties.get("reservationAffinity", {})
    if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION":
        return None
    return ", ".join(affinity.get("values", ())) or "unnamed"


def instance_of(data: Mapping[str, Any], *, project: str, now: datetime) -> Instance:
    """Return the instance that the cloud describes. An end without a date is dated `now`."""
    metadata, zone = read_metadata(data), last_of(data["zone"])
    state = _STATES.get(data.get("status", ""), "pending")
    price, action_id = metadata.get(PRICE, ""), metadata.get(ACTION_ID)
    stopped = data.get("lastStopTimestamp")
    return Instance(
        provider_id=provider_id_of(project, zone, data["name"]),
        action_id=None if action_id is None else ActionId(action_id),
        state=state,
        instance_type=last_of(data["machineType"]),
        zone=zone,
        capacity_type=capacity_type_of(data),
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=instant(data["creationTimestamp"]),
        terminated_at=None if state != "terminated" else now if stopped is None else instant(stopped),
    )


def is_made(managed: Mapping[str, Any]) -> bool:
    """Return whether the group has created an instance of that name, whether listed or not."""
    return managed.get("instanceStatus") in _STATES and managed.get("currentAction") != "DELETING"


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What operations say of an instance that is deleted or being deleted."""

    name: str
    launched_at: datetime | None = None
    ended_at: datetime | None = None  # None: not ended yet
    is_ending: bool = False
    failed_count: int = 0  # failed attempts to create it


def past_of(operations: Sequence[Mapping[str, Any]]) -> dict[str, Past]:
    """Return what operations say, by instance name; the earliest end counts."""
    past_by_name: dict[str, Past] = {}
    for operation in operations:
        name, kind = last_of(operation.get("targetLink", "")), operation.get("operationType", "")
        past = past_by_name.get(name) or Past(name=name)
        if kind == "insert" and first_error(operation.get("error")) is not None:
            past = msgspec.structs.replace(past, failed_count=past.failed_count + 1)
        elif kind == "insert":
            past = msgspec.structs.replace(past, launched_at=instant(operation["insertTime"]))
        elif kind in _ENDS and first_error(operation.get("error")) is None:
            at = instant(operation["endTime"]) if operation.get("status") == "DONE" else None
            earliest = min((end for end in (at, past.ended_at) if end is not None), default=None)
            past = msgspec.structs.replace(past, is_ending=True, ended_at=earliest)
        else:
            continue
        past_by_name[name] = past
    return past_by_name


def instant(text: str) -> datetime:
    """Return the instant of a timestamp; the cloud's have the UTC offset of Mountain View."""
    return datetime.fromisoformat(text).astimezone(UTC)


# ---- machine types


class InstanceType(MachineKind, frozen=True, kw_only=True):
    """A machine type with its GPUs, and what determines its price."""

    memory_mib: int
    accelerator: str | None = None  # the cloud's name


def parse_instance_type(
    data: Mapping[str, Any], template_accelerators: Sequence[Mapping[str, Any]] = ()
) -> InstanceType | None:
    """Return the machine type that the cloud describes, with GPUs that a template adds to it (N1). None for
    accelerators of other vendors, which our pods cannot use."""
    built_in = [
        (accelerator["guestAcceleratorType"], accelerator["guestAcceleratorCount"])
        for accelerator in data.get("accelerators", ())
    ]
    chosen = built_in or [
        (last_of(added["acceleratorType"]), added["acceleratorCount"]) for added in template_accelerators
    ]
    if any(not name.startswith("nvidia-") for name, _ in chosen):
        return None
    return build_instance_type(
        data["name"],
        vcpu_count=data["guestCpus"],
        memory_mib=data["memoryMb"],
        gpu_count=sum(count for _, count in chosen),
        accelerator=chosen[0][0] if chosen else None,
    )


def build_instance_type(
    name: str, *, vcpu_count: int, memory_mib: int, gpu_count: int = 0, accelerator: str | None = None
) -> InstanceType:
    """Return the machine type with its allocatable resources; unknown GPU models keep the cloud's name."""
    model = None if accelerator is None else gpu_model_name(accelerator) or accelerator
    return InstanceType(
        name=name,
        resources=machine_resources(vcpu_count, memory_mib * _MEBIBYTE * (1 - _MEMORY_UNSEEN_RATIO), gpu_count),
        vcpu_count=vcpu_count,
        memory_mib=memory_mib,
        accelerator=accelerator,
        gpu_model=model,
        gpu_memory_bytes=None if accelerator is None else _gpu_memory_bytes(accelerator, model),
    )


def gpus_by_accelerator(table: Iterable[GpuModel] = GPU_TABLE) -> dict[str, tuple[Accelerator, int]]:
    """Return accelerator and memory in GiB by accelerator name."""
    return {
        accelerator.name: (accelerator, size.memory_gib)
        for _, size in gpu_sizes(table)
        for accelerator in size.gcp_accelerators
    }


GPU_BY_ACCELERATOR = gpus_by_accelerator()


def _gpu_memory_bytes(accelerator: str, model: str | None) -> int | None:
    nominal = GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None
    if nominal is not None:
        return nominal
    if accelerator in GPU_BY_ACCELERATOR:
        return GPU_BY_ACCELERATOR[accelerator][1] * GIBIBYTE
    sized = _GPU_SIZE.search(accelerator)
    return None if sized is None else int(sized[1]) * GIBIBYTE


# ---- quotas. Compute Engine API v1, `Quota.metric` (discovery document of 2026-11-06), has only a spot metric for H100
# and none for later models: their quotas are by GPU family, reported by Cloud Quotas, and surface as launch refusals.

# Limits all on-demand GPUs of the project (Compute Engine, "GPU quotas"). Whether spot counts is undocumented, so spot
# is not limited by it.
GPUS_ALL_REGIONS = "GPUS_ALL_REGIONS"


def quota_metric(kind: InstanceType, capacity_type: CapacityType) -> str | None:
    """Return the region's quota metric; None without GPUs, or for GPUs without a metric."""
    if capacity_type is CapacityType.RESERVED:
        return None  # counted at reservation time
    accelerator, _ = GPU_BY_ACCELERATOR.get(kind.accelerator or "", (None, 0))
    if accelerator is None or accelerator.quota_metric is None:
        return None
    if capacity_type is CapacityType.SPOT:
        return f"PREEMPTIBLE_{accelerator.quota_metric}"
    return None if accelerator.is_spot_only else accelerator.quota_metric
