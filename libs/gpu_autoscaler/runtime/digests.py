"""Digests that say which code and which policy a plan was made with, and whether two requests are the same."""

import hashlib
from pathlib import Path

import msgspec

import gpu_autoscaler
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.job import JobRequested

# All that a plan is computed by: nouns, facts, decisions. Nothing else is asked while planning.
_SOURCES = ("model", "events", "core")
# What requests could say at first. Later fields are in a digest where they say something: without them a request has
# the digest that earlier versions have kept of it.
_FIRST_FIELDS = frozenset(
    {
        "budget_limit_usd",
        "container",
        "gpu_requirements",
        "job_id",
        "job_name",
        "max_duration_hours",
        "members",
        "preemptible",
        "priority",
        "project_id",
        "resources",
        "run_seconds",
        "start_by_at",
        "within",
        "workload_type",
    }
)


def core_digest() -> str:
    """Return 32 hex digits over the source of everything that decides; equal source, equal digest, on any machine."""
    root = Path(gpu_autoscaler.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for folder in _SOURCES for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def policy_digest(policy: ScalingPolicy) -> str:
    """Return 32 hex digits over every value of the policy, defaults included."""
    return hashlib.blake2b(msgspec.json.encode(policy, order="sorted"), digest_size=16).hexdigest()


def request_digest(request: JobRequested) -> str:
    """Return 32 hex digits over what is asked for; the job's id apart: who repeats a request may leave it to us."""
    asked = msgspec.structs.replace(request, job_id=None)
    said = msgspec.to_builtins(asked)
    for field in msgspec.structs.fields(asked):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if field.name not in _FIRST_FIELDS and getattr(asked, field.name) == default:
            del said[field.name]
    return hashlib.blake2b(msgspec.json.encode(said, order="sorted"), digest_size=16).hexdigest()
