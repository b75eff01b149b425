"""Admission of job requests: every violation of a request, or the job with every default filled in.

The scheduler and the gateway check what depends on the queue: a full queue, a duplicate id.
"""

import math
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from difflib import get_close_matches

import msgspec

from gpu_autoscaler.core.intake.annotations import annotation_violations
from gpu_autoscaler.core.policy.gpu_slices import Share, ShareWanted, best_share, shares_of, shares_on
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.pools import pool_allows
from gpu_autoscaler.core.policy.quota_settings import QuotaLimits, gpus_within_reach, owner_name, owners_with_limits
from gpu_autoscaler.core.policy.tenancy_settings import JOB_ACCOUNT, TenancyPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import JobId, derive_id
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, GpuRequirements, JobSpec, Runtime, Violation
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.resources import SHARED_GPU_RESOURCE, Resources, parse_quantity, parse_quantity_milli

# The job id names Kubernetes objects (63 characters at most) and leaves space for suffixes of controllers (Kubernetes
# documentation, "Object Names and IDs", read 2026-11-21).
JOB_ID_LENGTH_MAX = 50
JOB_NAME_LENGTH_MAX = 128  # project default: it is shown in tables and log lines
SUBMITTER_LENGTH_MAX = 512  # project default: a name of a user, such as the subject of an identity provider
IMAGE_LENGTH_MAX = 512  # project default: several times a registry, a path and a digest
PRIORITY_MAX = max(PRIORITY_NAMES.values())

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Names of environment variables (Kubernetes API reference, EnvVar; read 2026-11-21).
_ENV_KEY = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
# Keys and values of labels; annotations have the same keys (Kubernetes documentation, "Labels and Selectors",
# "Annotations", syntax; read 2026-11-21).
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

# More than any node has: such a number is a wrong unit (`64Ti` for `64Gi`).
_QUANTITY_MAX = {"cpu": 10_000 * 1000, "memory": 64 * 2**40, "ephemeral_storage": 512 * 2**40}
_GPU_MEMORY_GIB_MAX = 16 * 1024.0
_MODELS_COUNT_MAX = 16  # project default: more models mean any model
# Every member is a pod, and a demand of every plan until it runs. Project default.
JOB_MEMBERS_COUNT_MAX = 10_000
_BUDGET_USD_MAX = 1e9
_CHECKPOINT_MINUTES_MAX = 24 * 60.0
_RUN_SECONDS_MAX = 366 * 24 * 3600.0
# Command and environment are part of one Kubernetes object, which etcd limits to 1.5 MiB (etcd documentation, "System
# limits", read 2026-11-21), of every fact of the job, and of the memory of every service.
_CONTAINER_BYTES_MAX = 128 * 1024
# Clocks of senders may be wrong by minutes, not by days.
_AHEAD_MAX, _BEHIND_MAX = timedelta(days=1), timedelta(days=30)

# Kubernetes allows 256 KiB of annotations; these are part of every fact of the job. Project default.
POD_METADATA_BYTES_MAX = 16 * 1024
# Annotations of this project that a pod may set. Others have a field in the request or are written by the services.
ALLOWED_ANNOTATIONS = (
    labels.CHECKPOINTED_AT,
    labels.CHECKPOINT_HOOK,
    labels.DO_NOT_DISRUPT,
    labels.EVICTION_PRIORITY,
    labels.EXPECTED_END,
    labels.IDLE_ALLOWED,
)
# Labels by which Kubernetes controllers select their pods.
_CONTROLLER_LABELS = frozenset(
    {"job-name", "controller-uid", "pod-template-hash", "statefulset.kubernetes.io/pod-name"}
)
_RESERVED = ("kubernetes.io", "k8s.io", "x-k8s.io")  # for Kubernetes itself (the same document)
_GROUPS = frozenset({*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION, labels.POD_GROUP_TOTAL_COUNT})

# Other controllers derive names of Services and pods from the job id: these start with a letter and have limits of
# their own (KubeRay 1.3 allows a RayJob 47 characters; JobSet 0.8 appends the name of its part, two indexes and five
# characters). This fits all of them.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH_MAX = 40


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """What one node may provide, as far as known. A request beyond it can never run."""

    gpu_models: frozenset[str] = frozenset()  # empty: unknown, and every model of `GPU_MODELS` is valid
    gpus_per_node_max: int | None = None  # None: unknown
    shares: tuple[Share, ...] = ()  # available shares of GPUs


UNKNOWN_SUPPLY = Supply()


def supply(state: ClusterState, policy: ScalingPolicy) -> Supply:
    """Return what offers and nodes provide. Unknown until offers were sampled: nodes alone are not everything."""
    if state.offers is None:
        return UNKNOWN_SUPPLY
    offered = [(offer.gpu_model, offer.resources.gpu_count) for offer in state.offers.offers]
    present = [(node.gpu_model, node.allocatable.gpu_count) for node in state.nodes.values()]
    models = frozenset(model for model, _ in (*offered, *present) if model is not None)
    shares = [
        share
        for pool in policy.pools
        if pool.sharing is not None
        for offer in state.offers.offers
        if pool_allows(pool, offer)
        for share in shares_of(pool.sharing, offer)
    ]
    shares += [share for node in state.nodes.values() for share in shares_on(node)]
    most = max((count for _, count in (*offered, *present)), default=None)
    return Supply(gpu_models=models, gpus_per_node_max=most, shares=tuple(shares))


def job_id_of(requested: JobId | None, event_id: str) -> JobId:
    """Return the requested id, else one derived from the event: the same request is the same job."""
    return requested if requested is not None else JobId(f"job-{derive_id('job', event_id)[:12]}")


def admit(
    request: JobRequested, *, event_id: str, at: datetime, now: datetime, policy: ScalingPolicy, supply: Supply
) -> JobSpec | tuple[Violation, ...]:
    """Return the job with every default filled in, or every violation of the request. `at` is the time of the request,
    `now` that of the cluster. A job that needs no whole GPU gets the cheapest sufficient share."""
    models = supply.gpu_models or frozenset(GPU_MODELS)
    violations = (
        *_name_violations(request),
        *_namespace_violations(request, policy.tenancy),
        *_gpu_violations(request, policy, supply, models),
        *_container_violations(request),
        *_priority_violations(request),
        *_resource_violations(request),
        *_limit_violations(request, policy),
        *_quota_violations(request, policy),
        *_time_violations(at, now),
        *runtime_violations(request),
        *pod_metadata_violations(request),
    )
    return violations or _spec(request, event_id, at, policy, supply)


def _spec(request: JobRequested, event_id: str, at: datetime, policy: ScalingPolicy, supply: Supply) -> JobSpec:
    gpus, resources, budget_usd = request.gpu_requirements, request.resources, request.budget_limit_usd
    hours, minutes = _duration_hours(request, policy), request.checkpoint_interval_minutes
    priority, share = request.priority, cheapest_share(gpus, supply.shares) if wants_share(gpus) else None
    models, place = requested_models(gpus), policy.tenancy.place(request.project_id)
    priority = PRIORITY_NAMES[priority.lower()] if isinstance(priority, str) else priority
    return JobSpec(
        job_id=job_id_of(request.job_id, event_id),
        job_name=request.job_name,
        project_id=request.project_id,
        priority=priority,
        member_count=request.members,
        member_count_min=None if request.min_members == request.members else request.min_members,
        member_resources=Resources(
            cpu_milli=parse_quantity_milli(resources.cpu),
            memory_bytes=parse_quantity(resources.memory),
            gpu_count=gpus.gpu_count if share is None else 0,
            slices=() if share is None else ((share.resource, 1),),
            ephemeral_storage_bytes=parse_quantity(resources.ephemeral_storage),
            pod_count=1,
        ),
        gpu_model=models[0] if len(models) == 1 else None,
        gpu_models=models if len(models) > 1 else (),
        gpu_memory_bytes_min=memory_bytes_min(gpus.gpu_memory_gb) if share is None else replica_memory_bytes(share),
        image=request.container.image,
        command=request.container.command,
        env=request.container.env,
        workload_type=request.workload_type,
        is_preemptible=request.preemptible,
        expected_duration_seconds=request.expected_duration_seconds,
        budget_limit_micro_usd=None if budget_usd is None else round(budget_usd * MICRO_USD_PER_USD),
        duration_seconds_max=hours * 3600.0,
        requested_at=at,
        within=request.within,
        checkpoint_interval_seconds=minutes * 60.0 if isinstance(minutes, float) else minutes,
        start_by_at=request.start_by_at,
        finish_by_at=request.finish_by_at,
        runtime=Runtime(request.runtime.lower()),
        pod_labels=request.pod_labels,
        pod_annotations=_annotations(request),
        submitted_by=request.submitted_by,
        namespace=place.namespace,
        tenant=request.project_id if place.namespace else "",
        cost_center=policy.tenancy.project(request.project_id).cost_center or "",
        priority_class=policy.tenancy.priority_class(priority),
        service_account=JOB_ACCOUNT if place.is_created else "",
    )


def _annotations(request: JobRequested) -> dict[str, str]:
    """Return the annotations of the pods, and the run time: only simulated kubelets may know how long work takes."""
    if request.run_seconds is None:
        return request.pod_annotations
    return request.pod_annotations | {labels.SIMULATED_RUN_SECONDS: f"{request.run_seconds:g}"}


# ---- names, GPUs, container, priority, resources, limits, time


def _name_violations(request: JobRequested) -> Iterator[Violation]:
    if not request.job_name.strip():
        yield Violation("job_name", "is empty; set a name")
    elif len(request.job_name) > JOB_NAME_LENGTH_MAX:
        yield Violation(
            "job_name", f"has {len(request.job_name)} characters; at most {JOB_NAME_LENGTH_MAX} are allowed"
        )
    elif not request.job_name.isprintable():
        yield Violation("job_name", "contains unprintable characters; remove them")
    if not request.project_id.strip():
        yield Violation("project_id", "is empty; set the project that the job is charged to")
    elif not LABEL_VALUE.fullmatch(request.project_id):
        yield Violation("project_id", _label_rule(request.project_id))
    if len(request.submitted_by) > SUBMITTER_LENGTH_MAX:
        length = len(request.submitted_by)
        yield Violation("submitted_by", f"has {length} characters; at most {SUBMITTER_LENGTH_MAX} are allowed")
    if request.workload_type is not None and not LABEL_VALUE.fullmatch(request.workload_type):
        yield Violation("workload_type", _label_rule(request.workload_type))
    if request.within is not None and not LABEL_KEY.fullmatch(request.within):
        yield Violation("within", f"{_quoted(request.within)} is not a label key (example: {labels.ZONE})")
    job_id = request.job_id
    if job_id is not None and (len(job_id) > JOB_ID_LENGTH_MAX or not DNS_LABEL.fullmatch(job_id)):
        yield Violation(
            "job_id",
            f"{_quoted(job_id)} is not a DNS label of at most {JOB_ID_LENGTH_MAX} characters: lower-case letters,"
            " digits and `-`, with a letter or digit at both ends",
        )


def _namespace_violations(request: JobRequested, tenancy: TenancyPolicy) -> Iterator[Violation]:
    if LABEL_VALUE.fullmatch(request.project_id) and (problem := tenancy.place(request.project_id).problem()):
        yield Violation(
            "project_id",
            f"is {_quoted(request.project_id)}, which has no namespace: {problem}; have the project mapped to a"
            " namespace in tenancy.projects of the policy, or use another project",
        )


def _gpu_violations(
    request: JobRequested, policy: ScalingPolicy, supply: Supply, models: AbstractSet[str]
) -> Iterator[Violation]:
    gpus, members = request.gpu_requirements, request.members
    field = "gpu_requirements.gpu_count"
    if members < 1:
        yield Violation("members", f"is {members}; must be at least 1")
    elif request.min_members is not None and not 1 <= request.min_members <= members:
        yield Violation("min_members", f"is {request.min_members}; must be 1 to {members}, the number of members")
    if members > JOB_MEMBERS_COUNT_MAX:
        reason = f"is {members}; a job may have {JOB_MEMBERS_COUNT_MAX}; split it, or give each member more"
        yield Violation("members", reason)
    if gpus.gpu_count < 0:
        yield Violation(field, f"is {gpus.gpu_count}; must be 0 or more")
    elif gpus.gpu_count == 0 and (gpus.gpu_types or gpus.gpu_memory_gb is not None):
        yield Violation(field, "is 0, but a GPU type or GPU memory is requested; remove these or request GPUs")
    elif supply.gpus_per_node_max is not None and gpus.gpu_count > supply.gpus_per_node_max:
        most = f"no node has more than {supply.gpus_per_node_max} GPUs"
        yield Violation(field, f"is {gpus.gpu_count}, but {most}; spread the job over more members")
    elif members >= 1 and gpus.gpu_count * members > policy.max_gpus_per_job:
        total = gpus.gpu_count * members
        yield Violation(
            field, f"times {members} members is {total} GPUs; a job may have {policy.max_gpus_per_job}; request fewer"
        )
    if wants_share(gpus):
        yield from share_violations(gpus, supply.shares)
    if len(gpus.gpu_types) > _MODELS_COUNT_MAX:
        most = f"at most {_MODELS_COUNT_MAX} are allowed; omit the type if any model will do"
        yield Violation("gpu_requirements.gpu_type", f"has {len(gpus.gpu_types)} models; {most}")
        return
    unknown = [model for model in gpus.gpu_types if (gpu_model_name(model) or model) not in models]
    yield from (Violation("gpu_requirements.gpu_type", _unknown_model(model, models)) for model in unknown)
    if gpus.gpu_type == ():
        yield Violation("gpu_requirements.gpu_type", "is an empty list; list the accepted models, or omit it")
    elif not unknown and gpus.gpu_memory_gb is not None:
        yield from _gpu_memory_violations(gpus.gpu_memory_gb, [*requested_models(gpus)] or sorted(models))


def _gpu_memory_violations(memory_gib: float, models: list[str]) -> Iterator[Violation]:
    field = "gpu_requirements.gpu_memory_gb"
    if not 0 < memory_gib <= _GPU_MEMORY_GIB_MAX:
        yield Violation(field, f"is {memory_gib:g}; must be above zero and at most {_GPU_MEMORY_GIB_MAX:g} GiB")
        return
    sizes = [GPU_MODELS[name].memory_bytes if name in GPU_MODELS else None for name in models]
    known = [size for size in sizes if size is not None]
    # A model of several sizes, or an unknown model, may have enough.
    if len(known) < len(sizes) or not known or memory_gib * GIBIBYTE <= max(known):
        return
    owner = f"one {models[0]} has" if len(models) == 1 else "the largest GPU has"
    yield Violation(field, f"is {memory_gib:g}, but {owner} {max(known) / GIBIBYTE:g} GiB; request less")


def _unknown_model(requested: str, models: AbstractSet[str]) -> str:
    names = sorted(models)
    nearest = get_close_matches(requested.upper(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{_quoted(requested)} is not an available GPU model (known: {', '.join(names)}){hint}"


def _container_violations(request: JobRequested) -> Iterator[Violation]:
    image = request.container.image
    if not image.strip():
        yield Violation("container.image", "is empty; set the image to run")
    elif len(image) > IMAGE_LENGTH_MAX or any(character.isspace() for character in image):
        yield Violation(
            "container.image", f"{_quoted(image)} is not an image reference of at most {IMAGE_LENGTH_MAX} characters"
        )
    for key in sorted(request.container.env):
        if not _ENV_KEY.fullmatch(key):
            reason = "is not a variable name: letters, digits, `_`, `-` and `.`, not starting with a digit"
            yield Violation("container.env", f"{_quoted(key)} {reason}")
    parts = (*request.container.command, *request.container.env, *request.container.env.values())
    size_bytes = sum(len(part.encode()) for part in parts)
    if size_bytes > _CONTAINER_BYTES_MAX:
        kibibytes = f"{size_bytes / 1024:.0f} KiB; at most {_CONTAINER_BYTES_MAX // 1024} are allowed"
        yield Violation("container", f"has command and env of {kibibytes}; move large data into the image or a volume")


def _priority_violations(request: JobRequested) -> Iterator[Violation]:
    priority = request.priority
    rule = f"use {', '.join(sorted(PRIORITY_NAMES, key=lambda name: PRIORITY_NAMES[name]))}, or 0 to {PRIORITY_MAX}"
    if isinstance(priority, str):
        if priority.lower() not in PRIORITY_NAMES:
            yield Violation("priority", f"{_quoted(priority)} is unknown; {rule}")
    elif not 0 <= priority <= PRIORITY_MAX:
        yield Violation("priority", f"is {priority}; {rule}")


def _resource_violations(request: JobRequested) -> Iterator[Violation]:
    quantities = {
        "cpu": (request.resources.cpu, parse_quantity_milli),
        "memory": (request.resources.memory, parse_quantity),
        "ephemeral_storage": (request.resources.ephemeral_storage, parse_quantity),
    }
    for name, (text, parse) in quantities.items():
        try:
            amount = parse(text)
        except ValueError:
            yield Violation(
                f"resources.{name}", f"{_quoted(text)} is not a Kubernetes quantity (examples: 500m, 2, 16Gi)"
            )
            continue
        if amount <= 0 and not (amount == 0 and name == "ephemeral_storage"):
            yield Violation(f"resources.{name}", f"{_quoted(text)} must be above zero")
        elif amount > _QUANTITY_MAX[name]:
            yield Violation(f"resources.{name}", f"{_quoted(text)} is more than any node has; check the unit")


def _limit_violations(request: JobRequested, policy: ScalingPolicy) -> Iterator[Violation]:
    budget_usd, hours, run_seconds = request.budget_limit_usd, request.max_duration_hours, request.run_seconds
    # Comparisons with NaN are false, so each condition states what is valid.
    if budget_usd is not None and not 1 / MICRO_USD_PER_USD <= budget_usd <= _BUDGET_USD_MAX:
        yield Violation("budget_limit_usd", f"is {budget_usd:g}; must be above zero and at most {_BUDGET_USD_MAX:g}")
    if hours is not None and not 0 < hours <= policy.job_duration_hours_max:
        reason = f"is {hours:g}; must be above zero and at most {policy.job_duration_hours_max:g} hours"
        yield Violation("max_duration_hours", reason)
    if run_seconds is not None and not 0 <= run_seconds <= _RUN_SECONDS_MAX:
        yield Violation("run_seconds", f"is {run_seconds:g}; must be zero or more and at most {_RUN_SECONDS_MAX:g}")
    expected, limit_seconds = request.expected_duration_seconds, _duration_hours(request, policy) * 3600.0
    if expected is not None and not 1.0 <= expected <= limit_seconds:
        reason = f"is {expected:g}; must be 1 to {limit_seconds:g} seconds, the time limit (max_duration_hours)"
        yield Violation("expected_duration_seconds", reason)
    minutes = request.checkpoint_interval_minutes
    if isinstance(minutes, float) and minutes != 0.0 and not 1.0 <= minutes <= _CHECKPOINT_MINUTES_MAX:
        reason = f"is {minutes:g}; must be auto, 0 (never), or 1 to {_CHECKPOINT_MINUTES_MAX:g} minutes"
        yield Violation("checkpoint_interval_minutes", reason)


def _limits_of(request: JobRequested, policy: ScalingPolicy) -> tuple[tuple[str, QuotaLimits], ...]:
    return owners_with_limits(policy.quotas, request.project_id, request.submitted_by)


def _duration_hours(request: JobRequested, policy: ScalingPolicy) -> float:
    """Return the requested time limit, else the default within all maxima."""
    if request.max_duration_hours is not None:
        return request.max_duration_hours
    most = [limits.job_duration_hours_max for _, limits in _limits_of(request, policy)]
    bounds = [policy.job_duration_hours_max, *(hours for hours in most if hours is not None)]
    return min(policy.job_duration_hours_default, *bounds)


def _quota_violations(request: JobRequested, policy: ScalingPolicy) -> Iterator[Violation]:
    """Yield quotas that the job alone exceeds: it could never start."""
    gpu_count, hours = request.gpu_requirements.gpu_count * request.members, _duration_hours(request, policy)
    field = "gpu_requirements.gpu_count"
    for owner, limits in _limits_of(request, policy):
        whose, most_hours, month_hours = owner_name(owner), limits.job_duration_hours_max, limits.month_gpu_hours_max
        if limits.gpu_count_max is not None and gpu_count > limits.gpu_count_max:
            reason = f"is {gpu_count} for all members; {whose} may use {limits.gpu_count_max} at once; request fewer"
            yield Violation(field, reason, "quota")
        if most_hours is not None and hours > most_hours:
            reason = f"is {hours:g}; jobs of {whose} may have at most {most_hours:g} hours; request fewer"
            yield Violation("max_duration_hours", reason, "quota")
        if month_hours is not None and gpu_count * hours > month_hours:
            needed = f"times {gpu_count} GPUs is {gpu_count * hours:g} GPU-hours"
            reason = f"{needed}; {whose} may use {month_hours:g} a month; request fewer GPUs or a shorter time"
            yield Violation("max_duration_hours", reason, "quota")
    reach = gpus_within_reach(policy.quotas, request.project_id)
    if reach is not None and gpu_count > reach[0]:
        where = f"with all that cohort {reach[1]} lends it" if reach[1] else "of its nominal quota"
        most = f"project {request.project_id} may use {reach[0]} {where}"
        yield Violation(field, f"is {gpu_count} for all members; {most}; request fewer", "quota")


def _time_violations(at: datetime, now: datetime) -> Iterator[Violation]:
    if at > now + _AHEAD_MAX:
        yield Violation(
            "time",
            f"is {at.isoformat()}, more than a day ahead of the cluster ({now.isoformat()}); check the clock of the"
            " sender",
        )
    elif at < now - _BEHIND_MAX:
        yield Violation(
            "time",
            f"is {at.isoformat()}, more than {_BEHIND_MAX.days} days ago; send the request with the current time",
        )


# ---- runtime: the kind of object that runs the members


def runtime_violations(request: JobRequested) -> Iterator[Violation]:
    """Yield violations of the runtime, and of other fields for this runtime."""
    known = [runtime.value for runtime in Runtime]
    runtime = request.runtime.lower()
    if runtime not in known:
        nearest = get_close_matches(runtime, known, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        yield Violation("runtime", f"{request.runtime[:40]!r} is unknown (known: {', '.join(known)}){hint}")
        return
    if runtime == Runtime.JOB:
        return
    job_id = request.job_id
    if job_id is not None and (len(job_id) > NAME_LENGTH_MAX or not _NAME.fullmatch(job_id)):
        reason = f"start with a letter and have at most {NAME_LENGTH_MAX} characters, because pod names contain it"
        yield Violation("job_id", f"{job_id[:80]!r}: the id of a {runtime} must {reason}")
    if request.min_members is not None:
        yield Violation("min_members", f"is valid for runtime job only; a {runtime} starts with all its members")
    if runtime == Runtime.RAYJOB and not request.container.command:
        yield Violation("container.command", "is empty; set the command that Ray runs as entrypoint")


# ---- shares of a GPU


def wants_share(gpus: GpuRequirements) -> bool:
    """True if a share of one GPU is sufficient."""
    return gpus.is_shared or gpus.gpu_fraction is not None


def requested_models(gpus: GpuRequirements) -> tuple[str, ...]:
    """Return the canonical names of the requested GPU models, each once, in order of preference; empty: any."""
    return tuple(dict.fromkeys(gpu_model_name(model) or model for model in gpus.gpu_types))


def cheapest_share(gpus: GpuRequirements, shares: tuple[Share, ...]) -> Share | None:
    """Return the cheapest sufficient share; None: no available share is sufficient."""
    wanted = ShareWanted(
        gpu_models=requested_models(gpus),
        gpu_ratio_min=gpus.gpu_fraction,
        memory_bytes_min=memory_bytes_min(gpus.gpu_memory_gb),
    )
    return best_share(wanted, shares)


def memory_bytes_min(memory_gib: float | None) -> int | None:
    """Return the GPU memory in bytes; None: any."""
    return None if memory_gib is None else math.ceil(memory_gib * GIBIBYTE)


def replica_memory_bytes(share: Share) -> int | None:
    """Return the memory to request besides the resource: replicas of every size have the same resource name."""
    return share.memory_bytes if share.resource == SHARED_GPU_RESOURCE else None


def share_violations(gpus: GpuRequirements, shares: tuple[Share, ...]) -> Iterator[Violation]:
    """Yield violations of a request for a share of a GPU."""
    field = "gpu_requirements.gpu_fraction"
    if gpus.gpu_fraction is not None and not 0 < gpus.gpu_fraction <= 1:
        yield Violation(field, f"is {gpus.gpu_fraction:g}; must be above zero and at most 1, a whole GPU")
    elif gpus.gpu_count != 1:
        yield Violation("gpu_requirements.gpu_count", f"is {gpus.gpu_count}; must be 1 for a share of a GPU")
    elif gpus.gpu_fraction is None and gpus.gpu_memory_gb is None:
        yield Violation("gpu_requirements.is_shared", "is true, but no size is requested; set gpu_memory_gb")
    elif cheapest_share(gpus, shares) is None:
        names = sorted({f"{share.resource} of {share.gpu_model or 'any GPU'}" for share in shares})
        available = f" (available: {', '.join(names)})" if names else ": no pool of the policy shares its GPUs"
        yield Violation(field, f"requests more than any available share of a GPU{available}")


# ---- labels and annotations of pods: users may not write what identifies a pod


def pod_metadata_violations(request: JobRequested) -> Iterator[Violation]:
    """Yield violations of the labels and annotations of the pods."""
    for key, value in sorted(request.pod_labels.items()):
        if reason := _label_violation(key, value):
            yield Violation("pod_labels", f"{_quoted(key)} {reason}")
    for key, value in sorted(request.pod_annotations.items()):
        if reason := _annotation_violation(key, value):
            yield Violation("pod_annotations", f"{_quoted(key)} {reason}")
    size_bytes = _size_bytes(request.pod_labels) + _size_bytes(request.pod_annotations)
    if size_bytes > POD_METADATA_BYTES_MAX:
        most = f"{size_bytes / 1024:.0f} KiB with the labels; at most {POD_METADATA_BYTES_MAX // 1024} are allowed"
        yield Violation("pod_annotations", f"have {most}; move large data into the image or a volume")


def _label_violation(key: str, value: str) -> str:
    if reason := _key_violation(key):
        return reason
    if _domain(key).endswith(_RESERVED) or key in _CONTROLLER_LABELS:
        return "is reserved for Kubernetes and its controllers; use another key"
    if _is_reserved_for_us(key):
        return "is written by gpu-autoscaler; use another key"
    if value and not LABEL_VALUE.fullmatch(value):
        return f"is {_quoted(value)}, which is not a label value: at most 63 letters, digits, `-`, `_` and `.`"
    return ""


def _annotation_violation(key: str, value: str) -> str:
    if reason := _key_violation(key):
        return reason
    if key in _GROUPS:
        return "would add the pod to another pod group; members of a job are a gang already"
    if key == "kubernetes.io/config.mirror":
        return "marks mirror pods of the kubelet; remove it"
    if _is_reserved_for_us(key) and key not in ALLOWED_ANNOTATIONS:
        return f"is written by gpu-autoscaler, or has its own field; allowed are {', '.join(ALLOWED_ANNOTATIONS)}"
    return next((violation.reason for violation in annotation_violations(((key, value),))), "")


def _key_violation(key: str) -> str:
    return (
        "" if LABEL_KEY.fullmatch(key) else "is not a key: letters, digits, `-`, `_` and `.`, after a DNS name and `/`"
    )


def _is_reserved_for_us(key: str) -> bool:
    domain = _domain(key)
    return domain == labels.PREFIX or domain.endswith(f".{labels.PREFIX}")


def _domain(key: str) -> str:
    return key.rpartition("/")[0]


def _size_bytes(metadata: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())


def _label_rule(value: str) -> str:
    return (
        f"{_quoted(value)} is not a label value: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit"
        " at both ends"
    )


def _quoted(text: str) -> str:
    """Quote the text for display: long text is cut, control characters are escaped."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
