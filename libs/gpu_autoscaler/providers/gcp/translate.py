"""Google Cloud's words into ours: errors, instances, machine types. The only place that knows them.

Sources: Compute Engine API v1 (discovery document of 2026-11-06): `Instance`, `ManagedInstance`, `Operation`,
`MachineType`; cluster-autoscaler, cloudprovider/gce/autoscaling_gce_client.go (which codes mean that there is no
capacity, or no quota); Compute Engine, "Troubleshooting resource availability errors"; read 2026-11-21.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.allocatable import PODS_PER_NODE, allocatable
from gpu_autoscaler.providers.gcp.permissions import REQUESTS, permissions_of
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope
from gpu_autoscaler.providers.rest import Answer, error_text
from gpu_autoscaler.providers.tokens import idempotency_token

PROVIDER_ID_PREFIX = "gce://"
# Calls that buy: what is refused of them is final.
LAUNCHES = ("instanceGroupManagers.createInstances", f"{REQUESTS}.insert")
THROTTLED_SECONDS = 5.0
# Metadata of our instances. Keys take no dots and slashes, so they are not those of our labels.
INSTALLATION, ACTION_ID, POOL = "gpu-autoscaler-installation", "gpu-autoscaler-action-id", "gpu-autoscaler-pool"
PRICE = "gpu-autoscaler-price-micro-usd-per-hour"  # what was agreed, as no call tells it afterwards
NODE_LABELS, NODE_TAINTS = (
    "gpu-autoscaler-node-labels",
    "gpu-autoscaler-node-taints",
)  # as the kubelet's flags take them
CREATED_BY = "created-by"  # set by managed groups on every instance they make

_REFUSED: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": ("capacity", "offer"),
    "REGION_RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "RESOURCE_POOL_EXHAUSTED": ("capacity", "offer"),
    "INSUFFICIENT_CAPACITY": ("capacity", "offer"),
    "RESERVATION_CAPACITY_EXCEEDED": ("capacity", "offer"),
    "RESERVATION_NOT_READY": ("capacity", "offer"),
    "UNSUPPORTED_OPERATION": ("capacity", "offer"),
    "RESIZE_REQUEST_TIMED_OUT": ("capacity", "offer"),  # ours: nothing came of a request within its limit
    "IP_SPACE_EXHAUSTED": ("capacity", "zone"),
    "IP_SPACE_EXHAUSTED_WITH_DETAILS": ("capacity", "zone"),
    "QUOTA_EXCEEDED": ("quota", "region"),
    "quotaExceeded": ("quota", "region"),
    "PERMISSIONS_ERROR": ("permission", "region"),
    "forbidden": ("permission", "region"),
    "accessNotConfigured": ("permission", "region"),
}
_OTHER: tuple[RefusalKind, RefusalScope] = ("configuration", "offer")  # VM_EXTERNAL_IP_ACCESS_POLICY_CONSTRAINT ...
# What a group meets and tries again by itself, soon: no refusal.
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
    # Ours are never suspended; one that somebody suspended still is one, and costs its memory and disks.
    "SUSPENDING": "running",
    "SUSPENDED": "running",
    "PENDING_STOP": "terminating",
    "STOPPING": "terminating",
    "DEPROVISIONING": "terminating",
    # Taken by the cloud, or stopped: its work is over, and it is not started again.
    "STOPPED": "terminated",
    "TERMINATED": "terminated",
}
_ENDS = frozenset({"delete", "compute.instances.preempted", "compute.instances.hostError"})
_MEBIBYTE = 2**20
_MEMORY_UNSEEN_RATIO = 0.06  # our own figure: memory that a machine is sold with and its system does not see
_DISK_BYTES = 100 * GIBIBYTE  # of the template; S64 asks for 100 GiB
_GPU_SIZE = re.compile(r"(\d+)gb")
# Sizes that the name does not tell (Compute Engine, "GPU machine types", read 2026-11-21).
_GPU_GIB = {"nvidia-tesla-a100": 40, "nvidia-tesla-v100": 16, "nvidia-tesla-p4": 8, "nvidia-tesla-p100": 16}


# ---- errors


def reason_of(answer: Answer) -> str:
    """Return the cloud's own word of an error answer."""
    error = answer.body.get("error", {}) if isinstance(answer.body, dict) else {}
    errors = error.get("errors", ()) if isinstance(error, dict) else ()
    return str(errors[0].get("reason", "")) if errors else str(error.get("status", "")) if error else ""


def is_throttled(answer: Answer) -> bool:
    """True for answers that mean: too often. Some come as 403."""
    return answer.status == 429 or (answer.status == 403 and reason_of(answer) in _THROTTLED)


def failure(operation: str, answer: Answer) -> AutoscalerError:
    """Return our error for a refused call. Of reads nothing is final: what they tell is asked for again."""
    reason = reason_of(answer) or f"HTTP {answer.status}"
    told = f"{reason}: {error_text(answer)}"
    if answer.status == 401:
        return TransientError(
            f"{operation}: {told}; see that the credentials are valid, and this machine's clock is right"
        )
    if answer.status in (408, 409, 412) and operation not in LAUNCHES:
        return TransientError(f"{operation}: {told}; the same call may be made again")
    if reason == "resourceNotReady":
        return TransientError(f"{operation}: {told}; the same call may be made again")
    if answer.status == 403 and reason not in _REFUSED:
        reason = "forbidden"
    refused = refusal(operation, reason, told)
    if operation in LAUNCHES:
        return refused
    asked_again = TransientError(str(refused))
    asked_again.__cause__ = refused
    return asked_again


def denied_kind(exc: AutoscalerError) -> RefusalKind | None:
    """Return of which kind a failure is that stays until somebody changes something, None for a passing one."""
    refused = exc if isinstance(exc, LaunchRefused) else exc.__cause__
    return refused.kind if isinstance(refused, LaunchRefused) else None


def is_passing(code: str) -> bool:
    """True for errors of a launch that the group tries again by itself."""
    return code in _PASSING


def refusal(operation: str, code: str, told: str) -> LaunchRefused:
    """Return the refusal for the cloud's own code, wherever it stood."""
    kind, scope = _REFUSED.get(code, _OTHER)
    if code == "accessNotConfigured":
        told += "; enable the API in this project"
    elif kind == "permission":
        told += (
            f"; allow {', '.join(permissions_of(operation))} (`gpu-autoscaler doctor --policy` prints the whole role)"
        )
    elif kind == "configuration":
        told += "; see project, zones and groups in the settings under [gcp], and the group's template"
    return LaunchRefused(f"{operation}: {told}", code=code, kind=kind, scope=scope)


def first_error(errors: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return code and message of an operation's, or a last attempt's, errors; None where there are none."""
    for error in (errors or {}).get("errors", ()):
        return str(error.get("code", "")), str(error.get("message", ""))
    return None


# ---- names


def owner_prefix(installation: str) -> str:
    """Return how the names of an installation's instances begin."""
    return f"gpu-{_digest(installation, 8)}-"


def token_prefix(installation: str, action_id: ActionId) -> str:
    """Return how the name of this order's instance begins, whatever it was bought from."""
    return f"{owner_prefix(installation)}{idempotency_token(installation, action_id)}-"


def group_suffix(zone: str, name: str) -> str:
    """Return how the names of the instances of a group end, so that one that is gone still tells what it was."""
    return _digest(f"{zone}/{name}", 6)


def instance_name(order: Order, group_zone: str, group_name: str) -> str:
    """Return the one name that this order can have in this group: a group takes each name once."""
    return token_prefix(order.installation, order.action_id) + group_suffix(group_zone, group_name)


def provider_id_of(project: str, zone: str, name: str) -> ProviderId:
    """Return the name that Kubernetes' cloud provider gives nodes: `gce://project/zone/name`."""
    return ProviderId(f"{PROVIDER_ID_PREFIX}{project}/{zone}/{name}")


def parse_provider_id(provider_id: ProviderId, project: str) -> tuple[str, str]:
    """Return zone and name. Raises PermanentError for the name of another cloud or project."""
    parts = provider_id.removeprefix(PROVIDER_ID_PREFIX).split("/")
    if not provider_id.startswith(PROVIDER_ID_PREFIX) or len(parts) != 3 or parts[0] != project:
        raise PermanentError(
            f"{provider_id} is no instance of this cloud ({PROVIDER_ID_PREFIX}{project}/...): left untouched"
        )
    return parts[1], parts[2]


def last_of(url: str) -> str:
    """Return the last part of a resource's URL: its name."""
    return url.rpartition("/")[2]


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


# ---- instances


def metadata_for(order: Order) -> dict[str, str]:
    """Return what an instance carries so that it can be known again as ours, and as this order's; its node's labels."""
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


def read_metadata(told: Mapping[str, Any]) -> dict[str, str]:
    """Return an instance's metadata by key."""
    return {item["key"]: item.get("value", "") for item in told.get("metadata", {}).get("items", ())}


def capacity_type_of(properties: Mapping[str, Any]) -> CapacityType:
    """Return how an instance, or what a template makes, is bought."""
    scheduling = properties.get("scheduling", {})
    model = scheduling.get("provisioningModel")
    if model == "SPOT" or scheduling.get("preemptible"):
        return CapacityType.SPOT
    return CapacityType.ON_DEMAND if reservation_of(properties) is None else CapacityType.RESERVED


def reservation_of(properties: Mapping[str, Any]) -> str | None:
    """Return the reservation that is used up first and only, None where any or none is."""
    affinity = properties.get("reservationAffinity", {})
    if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION":
        return None
    return ", ".join(affinity.get("values", ())) or "unnamed"


def instance_of(told: Mapping[str, Any], *, project: str, now: datetime) -> Instance:
    """Return what the cloud tells of an instance. An end without a date is dated `now`, when it is first seen."""
    metadata, zone = read_metadata(told), last_of(told["zone"])
    state = _STATES.get(told.get("status", ""), "pending")
    price, action_id = metadata.get(PRICE, ""), metadata.get(ACTION_ID)
    stopped = told.get("lastStopTimestamp")
    return Instance(
        provider_id=provider_id_of(project, zone, told["name"]),
        action_id=None if action_id is None else ActionId(action_id),
        state=state,
        instance_type=last_of(told["machineType"]),
        zone=zone,
        capacity_type=capacity_type_of(told),
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=instant(told["creationTimestamp"]),
        terminated_at=None if state != "terminated" else now if stopped is None else instant(stopped),
    )


def is_made(managed: Mapping[str, Any]) -> bool:
    """True where the group has an instance of that name by now, shown in lists or not."""
    return managed.get("instanceStatus") in _STATES and managed.get("currentAction") != "DELETING"


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What operations tell of an instance that is no more, or on its way out."""

    name: str
    launched_at: datetime | None = None
    ended_at: datetime | None = None  # None: its end has begun
    is_ending: bool = False
    failed_count: int = 0  # attempts to make it that came to nothing


def past_of(operations: Sequence[Mapping[str, Any]]) -> dict[str, Past]:
    """Return what operations tell, by instance name; the earliest end counts."""
    found: dict[str, Past] = {}
    for operation in operations:
        name, kind = last_of(operation.get("targetLink", "")), operation.get("operationType", "")
        one = found.get(name) or Past(name=name)
        if kind == "insert" and first_error(operation.get("error")) is not None:
            one = msgspec.structs.replace(one, failed_count=one.failed_count + 1)
        elif kind == "insert":
            one = msgspec.structs.replace(one, launched_at=instant(operation["insertTime"]))
        elif kind in _ENDS and first_error(operation.get("error")) is None:
            at = instant(operation["endTime"]) if operation.get("status") == "DONE" else None
            earliest = min((each for each in (at, one.ended_at) if each is not None), default=None)
            one = msgspec.structs.replace(one, is_ending=True, ended_at=earliest)
        else:
            continue
        found[name] = one
    return found


def instant(text: str) -> datetime:
    """Return the instant of a timestamp; the cloud's own carry the offset of Mountain View."""
    return datetime.fromisoformat(text).astimezone(UTC)


# ---- machine types


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A machine type with its GPUs: what pods get of it, and what it is priced by."""

    name: str
    resources: Resources
    vcpu_count: int
    memory_mib: int
    accelerator: str | None = None  # as the cloud names it
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None


def kind_of(told: Mapping[str, Any], added: Sequence[Mapping[str, Any]] = ()) -> Kind | None:
    """Return what the cloud tells of a machine type, with GPUs that a template adds to it (N1).

    None for accelerators that are not NVIDIA's, which our pods cannot use.
    """
    built_in = [
        (accelerator["guestAcceleratorType"], accelerator["guestAcceleratorCount"])
        for accelerator in told.get("accelerators", ())
    ]
    chosen = built_in or [(last_of(one["acceleratorType"]), one["acceleratorCount"]) for one in added]
    if any(not name.startswith("nvidia-") for name, _ in chosen):
        return None
    return build_instance_type(
        told["name"],
        vcpu_count=told["guestCpus"],
        memory_mib=told["memoryMb"],
        gpu_count=sum(count for _, count in chosen),
        accelerator=chosen[0][0] if chosen else None,
    )


def build_instance_type(
    name: str, *, vcpu_count: int, memory_mib: int, gpu_count: int = 0, accelerator: str | None = None
) -> Kind:
    """Return the type with what is left of it for pods; a GPU that we have no name for keeps the cloud's."""
    whole = Resources(
        cpu_milli=vcpu_count * 1000,
        memory_bytes=int(memory_mib * _MEBIBYTE * (1 - _MEMORY_UNSEEN_RATIO)),
        gpu_count=gpu_count,
        ephemeral_storage_bytes=_DISK_BYTES,
        pod_count=PODS_PER_NODE,
    )
    model = None if accelerator is None else gpu_model_name(accelerator) or accelerator
    return Kind(
        name=name,
        resources=allocatable(whole),
        vcpu_count=vcpu_count,
        memory_mib=memory_mib,
        accelerator=accelerator,
        gpu_model=model,
        gpu_memory_bytes=None if accelerator is None else _gpu_memory_bytes(accelerator, model),
    )


def _gpu_memory_bytes(accelerator: str, model: str | None) -> int | None:
    nominal = GPU_MODELS[model].memory_bytes if model in GPU_MODELS else None
    if nominal is not None:
        return nominal
    sized = _GPU_SIZE.search(accelerator)
    gibibytes = int(sized[1]) if sized else _GPU_GIB.get(accelerator)
    return None if gibibytes is None else gibibytes * GIBIBYTE
