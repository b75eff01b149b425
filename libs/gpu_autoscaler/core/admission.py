"""Whether a request can become a job: all of its mistakes at once, or the checked job in our units.

Called by the scheduler for each `job.requested`, and by the gateway before it publishes one. What depends on the
cluster's state (the queue is full, the id is taken) is theirs to say.
"""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from difflib import get_close_matches

import msgspec

from gpu_autoscaler.core.admitting.pod_marks import LABEL_KEY, LABEL_VALUE, mark_mistakes
from gpu_autoscaler.core.admitting.runtimes import runtime_mistakes
from gpu_autoscaler.core.admitting.share_asked import (
    is_share,
    memory_min,
    replica_memory_bytes,
    requested_models,
    share_violations,
    share_for,
)
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.pools import pool_allows
from gpu_autoscaler.core.slicing import Share, shares_of, shares_on
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, gpu_model_name
from gpu_autoscaler.model.ids import JobId, derive_id
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, JobSpec, Mistake, Runtime
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.resources import Resources, parse_quantity, parse_quantity_milli

# The job's id names Kubernetes objects (63 characters at most) and leaves room for what their controllers append
# (Kubernetes documentation, "Object Names and IDs", read 2026-11-21).
JOB_ID_LENGTH_MAX = 50
JOB_NAME_LENGTH_MAX = 128  # our own: it goes into tables and log lines
IMAGE_LENGTH_MAX = 512  # our own: a registry, a path and a digest fit several times
PRIORITY_MAX = max(PRIORITY_NAMES.values())

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Names of environment variables (Kubernetes API reference, EnvVar; read 2026-11-21).
_ENV_KEY = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")

# More of one member than any machine has, by far: such a number is a slip of the unit (`64Ti` for `64Gi`).
_QUANTITY_MAX = {"cpu": 10_000 * 1000, "memory": 64 * 2**40, "ephemeral_storage": 512 * 2**40}
_GPU_MEMORY_GIB_MAX = 16 * 1024.0
_MODELS_COUNT_MAX = 16  # our own: of so many any will do
_BUDGET_USD_MAX = 1e9
_RUN_SECONDS_MAX = 366 * 24 * 3600.0
# Command and environment go into one Kubernetes object, of which etcd takes 1.5 MiB (etcd documentation, "System
# limits", read 2026-11-21), into every fact that carries the job, and into the memory of every service.
_CONTAINER_BYTES_MAX = 128 * 1024
# The sender's clock may be wrong by minutes. A request of another month, or of tomorrow, is not what it says.
_AHEAD_MAX, _BEHIND_MAX = timedelta(days=1), timedelta(days=30)


def job_id_of(asked: JobId | None, event_id: str) -> JobId:
    """Return the id that was asked for, else one derived from the event: the same request is the same job."""
    return asked if asked is not None else JobId(f"job-{derive_id('job', event_id)[:12]}")


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may ask of one node, as far as is known; what nobody sells and no node has cannot ever run."""

    gpu_models: frozenset[str] = frozenset()  # empty: not known yet
    gpus_per_node_max: int | None = None  # None: not known yet
    shares: tuple[Share, ...] = ()  # parts of GPUs that can be had


def supply(state: ClusterState, policy: ScalingPolicy) -> Supply:
    """Return what is for sale or there. Until offers were sampled nothing is known: nodes alone are not all."""
    if state.offers is None:
        return Supply()
    sold = [(offer.gpu_model, offer.resources.gpu_count) for offer in state.offers.offers]
    there = [(node.gpu_model, node.allocatable.gpu_count) for node in state.nodes.values()]
    models = frozenset(model for model, _ in (*sold, *there) if model is not None)
    sharing = [(pool, pool.sharing) for pool in policy.pools if pool.sharing is not None]
    parts = [
        share
        for pool, how in sharing
        for offer in state.offers.offers
        if pool_allows(pool, offer)
        for share in shares_of(how, offer)
    ]
    parts += [share for node in state.nodes.values() for share in shares_on(node)]
    most = max((count for _, count in (*sold, *there)), default=None)
    return Supply(gpu_models=models, gpus_per_node_max=most, shares=tuple(parts))


def admit(
    request: JobRequested,
    *,
    event_id: str,
    at: datetime,
    now: datetime,
    policy: ScalingPolicy,
    gpu_models: AbstractSet[str],
    gpus_per_node_max: int | None,
    shares: tuple[Share, ...] = (),
) -> JobSpec | tuple[Mistake, ...]:
    """Return the job, checked and with every default filled in, or everything that is wrong with the request.

    `at` is when the request says that it was made, `now` the cluster's time.
    `gpu_models` are the models that can be had; empty means not known yet, and then every model that we have a name
    for will do. `gpus_per_node_max` is the most GPUs that one node has; None means not known yet. `shares` are the
    parts of GPUs that can be had: a job that needs no whole GPU is given the cheapest that is enough for it.
    """
    known = Supply(
        gpu_models=frozenset(gpu_models) or frozenset(GPU_MODELS), gpus_per_node_max=gpus_per_node_max, shares=shares
    )
    mistakes = (
        *_names(request),
        *_gpus(request, policy, known),
        *_container(request),
        *_priority(request),
        *_resources(request),
        *_limits(request, policy),
        *_time(at, now),
        *runtime_mistakes(request),
        *mark_mistakes(request),
    )
    return mistakes or _spec(request, event_id, at, policy, known)


def _spec(request: JobRequested, event_id: str, at: datetime, policy: ScalingPolicy, known: Supply) -> JobSpec:
    """The job in our units; the request has no mistakes."""
    gpus, asked, budget_usd = request.gpu_requirements, request.resources, request.budget_limit_usd
    default_hours = min(policy.job_duration_hours_default, policy.job_duration_hours_max)
    hours = default_hours if request.max_duration_hours is None else request.max_duration_hours
    priority, share = request.priority, share_for(gpus, known.shares) if is_share(gpus) else None
    models = requested_models(gpus)
    return JobSpec(
        job_id=job_id_of(request.job_id, event_id),
        job_name=request.job_name,
        project_id=request.project_id,
        priority=PRIORITY_NAMES[priority.lower()] if isinstance(priority, str) else priority,
        member_count=request.members,
        member_count_min=None if request.min_members == request.members else request.min_members,
        member_resources=Resources(
            cpu_milli=parse_quantity_milli(asked.cpu),
            memory_bytes=parse_quantity(asked.memory),
            gpu_count=gpus.gpu_count if share is None else 0,
            slices=() if share is None else ((share.resource, 1),),
            ephemeral_storage_bytes=parse_quantity(asked.ephemeral_storage),
            pod_count=1,
        ),
        gpu_model=models[0] if len(models) == 1 else None,
        gpu_models=models if len(models) > 1 else (),
        gpu_memory_bytes_min=memory_min(gpus.gpu_memory_gb) if share is None else replica_memory_bytes(share),
        image=request.container.image,
        command=request.container.command,
        env=request.container.env,
        workload_type=request.workload_type,
        is_preemptible=request.preemptible,
        budget_limit_micro_usd=None if budget_usd is None else round(budget_usd * MICRO_USD_PER_USD),
        duration_seconds_max=hours * 3600.0,
        requested_at=at,
        run_seconds=request.run_seconds,
        within=request.within,
        start_by_at=request.start_by_at,
        runtime=Runtime(request.runtime.lower()),
        pod_labels=request.pod_labels,
        pod_annotations=request.pod_annotations,
    )


def _names(request: JobRequested) -> Iterator[Mistake]:
    if not request.job_name.strip():
        yield Mistake("job_name", "is empty; give the job a name")
    elif len(request.job_name) > JOB_NAME_LENGTH_MAX:
        yield Mistake("job_name", f"has {len(request.job_name)} characters; at most {JOB_NAME_LENGTH_MAX} are allowed")
    elif not request.job_name.isprintable():
        yield Mistake("job_name", "contains characters that cannot be printed")
    if not request.project_id.strip():
        yield Mistake("project_id", "is empty; name the project that the job is charged to")
    elif not LABEL_VALUE.fullmatch(request.project_id):
        yield Mistake("project_id", _label_rule(request.project_id))
    if request.workload_type is not None and not LABEL_VALUE.fullmatch(request.workload_type):
        yield Mistake("workload_type", _label_rule(request.workload_type))
    if request.within is not None and not LABEL_KEY.fullmatch(request.within):
        yield Mistake("within", f"{_quoted(request.within)} is no key of a label (example: {labels.ZONE})")
    job_id = request.job_id
    if job_id is not None and (len(job_id) > JOB_ID_LENGTH_MAX or not _DNS_LABEL.fullmatch(job_id)):
        yield Mistake(
            "job_id",
            f"{_quoted(job_id)} is no DNS label of at most {JOB_ID_LENGTH_MAX} characters: lower-case letters, digits "
            "and `-`, with a letter or digit at both ends",
        )


def _gpus(request: JobRequested, policy: ScalingPolicy, known: Supply) -> Iterator[Mistake]:
    gpus, members, models = request.gpu_requirements, request.members, known.gpu_models
    field = "gpu_requirements.gpu_count"
    if members < 1:
        yield Mistake("members", f"is {members}; a job has at least one member")
    elif request.min_members is not None and not 1 <= request.min_members <= members:
        yield Mistake("min_members", f"is {request.min_members}; at least one member starts, and at most all {members}")
    if gpus.gpu_count < 0:
        yield Mistake(field, f"is {gpus.gpu_count}; a member asks for GPUs, or for none (0)")
    elif gpus.gpu_count == 0 and (gpus.gpu_types or gpus.gpu_memory_gb is not None):
        yield Mistake(field, "is 0, but a GPU type or GPU memory is asked for; leave these out or ask for GPUs")
    elif known.gpus_per_node_max is not None and gpus.gpu_count > known.gpus_per_node_max:
        most = f"no node has more than {known.gpus_per_node_max} GPUs"
        yield Mistake(field, f"is {gpus.gpu_count}, but {most}; spread the job over more members")
    elif members >= 1 and gpus.gpu_count * members > policy.max_gpus_per_job:
        total = gpus.gpu_count * members
        yield Mistake(field, f"times {members} members is {total} GPUs; a job may have {policy.max_gpus_per_job}")
    if is_share(gpus):
        yield from share_violations(gpus, known.shares)
    if len(gpus.gpu_types) > _MODELS_COUNT_MAX:
        most = f"at most {_MODELS_COUNT_MAX} can be named; leave the type out where any will do"
        yield Mistake("gpu_requirements.gpu_type", f"has {len(gpus.gpu_types)} models; {most}")
        return
    unknown = [each for each in gpus.gpu_types if (gpu_model_name(each) or each) not in models]
    yield from (Mistake("gpu_requirements.gpu_type", _unknown_model(each, models)) for each in unknown)
    if gpus.gpu_type == ():
        yield Mistake("gpu_requirements.gpu_type", "is an empty list; name the models that will do, or leave it out")
    elif not unknown and gpus.gpu_memory_gb is not None:
        yield from _gpu_memory(gpus.gpu_memory_gb, [*requested_models(gpus)] or sorted(models))


def _gpu_memory(memory_gib: float, models: list[str]) -> Iterator[Mistake]:
    field = "gpu_requirements.gpu_memory_gb"
    if not 0 < memory_gib <= _GPU_MEMORY_GIB_MAX:
        yield Mistake(field, f"is {memory_gib:g}; it must be above zero and at most {_GPU_MEMORY_GIB_MAX:g} GiB")
        return
    sizes = [GPU_MODELS[name].memory_bytes if name in GPU_MODELS else None for name in models]
    known = [size for size in sizes if size is not None]
    # A model that was sold in several sizes, or that we do not know, may have enough.
    if len(known) < len(sizes) or not known or memory_gib * GIBIBYTE <= max(known):
        return
    whose = f"one {models[0]} has" if len(models) == 1 else "the largest GPU has"
    yield Mistake(field, f"is {memory_gib:g}, but {whose} {max(known) / GIBIBYTE:g} GiB")


def _unknown_model(asked: str, models: AbstractSet[str]) -> str:
    names = sorted(models)
    nearest = get_close_matches(asked.upper(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{_quoted(asked)} is no GPU model that can be had here (known: {', '.join(names)}){hint}"


def _container(request: JobRequested) -> Iterator[Mistake]:
    image = request.container.image
    if not image.strip():
        yield Mistake("container.image", "is empty; name the image to run")
    elif len(image) > IMAGE_LENGTH_MAX or any(character.isspace() for character in image):
        yield Mistake("container.image", f"{_quoted(image)} is no image reference of {IMAGE_LENGTH_MAX} characters")
    for key in sorted(request.container.env):
        if not _ENV_KEY.fullmatch(key):
            reason = "is no name of a variable: letters, digits, `_`, `-` and `.`, not starting with a digit"
            yield Mistake("container.env", f"{_quoted(key)} {reason}")
    parts = (*request.container.command, *request.container.env, *request.container.env.values())
    size_bytes = sum(len(part.encode()) for part in parts)
    if size_bytes > _CONTAINER_BYTES_MAX:
        kibibytes = f"{size_bytes / 1024:.0f} KiB; at most {_CONTAINER_BYTES_MAX // 1024} can be"
        yield Mistake("container", f"has command and env of {kibibytes}: put what is large into the image or a volume")


def _priority(request: JobRequested) -> Iterator[Mistake]:
    priority = request.priority
    rule = f"use {', '.join(sorted(PRIORITY_NAMES, key=lambda name: PRIORITY_NAMES[name]))}, or 0 to {PRIORITY_MAX}"
    if isinstance(priority, str):
        if priority.lower() not in PRIORITY_NAMES:
            yield Mistake("priority", f"{_quoted(priority)} is no priority; {rule}")
    elif not 0 <= priority <= PRIORITY_MAX:
        yield Mistake("priority", f"is {priority}; {rule}")


def _resources(request: JobRequested) -> Iterator[Mistake]:
    asked = {
        "cpu": (request.resources.cpu, parse_quantity_milli),
        "memory": (request.resources.memory, parse_quantity),
        "ephemeral_storage": (request.resources.ephemeral_storage, parse_quantity),
    }
    for name, (text, parse) in asked.items():
        try:
            amount = parse(text)
        except ValueError:
            yield Mistake(f"resources.{name}", f"{_quoted(text)} is no Kubernetes quantity (examples: 500m, 2, 16Gi)")
            continue
        if amount <= 0 and not (amount == 0 and name == "ephemeral_storage"):
            yield Mistake(f"resources.{name}", f"{_quoted(text)} must be above zero")
        elif amount > _QUANTITY_MAX[name]:
            yield Mistake(f"resources.{name}", f"{_quoted(text)} is more than any node has")


def _limits(request: JobRequested, policy: ScalingPolicy) -> Iterator[Mistake]:
    budget_usd, hours, run_seconds = request.budget_limit_usd, request.max_duration_hours, request.run_seconds
    # Comparisons with NaN are false, so each asks for what is right and refuses the rest.
    if budget_usd is not None and not 1 / MICRO_USD_PER_USD <= budget_usd <= _BUDGET_USD_MAX:
        yield Mistake("budget_limit_usd", f"is {budget_usd:g}; it must be above zero and at most {_BUDGET_USD_MAX:g}")
    if hours is not None and not 0 < hours <= policy.job_duration_hours_max:
        reason = f"is {hours:g}; it must be above zero and at most {policy.job_duration_hours_max:g} hours"
        yield Mistake("max_duration_hours", reason)
    if run_seconds is not None and not 0 <= run_seconds <= _RUN_SECONDS_MAX:
        yield Mistake("run_seconds", f"is {run_seconds:g}; it must be zero or more and at most {_RUN_SECONDS_MAX:g}")


def _time(at: datetime, now: datetime) -> Iterator[Mistake]:
    if at > now + _AHEAD_MAX:
        yield Mistake("time", f"is {at.isoformat()}, more than a day ahead of the clock here ({now.isoformat()})")
    elif at < now - _BEHIND_MAX:
        yield Mistake(
            "time", f"is {at.isoformat()}, more than {_BEHIND_MAX.days} days ago; ask again with the time of now"
        )


def _label_rule(value: str) -> str:
    return (
        f"{_quoted(value)} cannot be a label: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at "
        "both ends"
    )


def _quoted(text: str) -> str:
    """The text as it can be shown: cut where it is long, control characters escaped."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
