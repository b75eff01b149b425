"""A job that needs a part of a GPU alone: which part it is given, or why it can have none. Called by admission."""

import math
from collections.abc import Iterator

from gpu_autoscaler.core.slicing import Share, ShareWanted, best_share
from gpu_autoscaler.model.gpu import GIBIBYTE, gpu_model_name
from gpu_autoscaler.model.jobs import GpuRequirements, Mistake
from gpu_autoscaler.model.resources import SHARED_GPU_RESOURCE


def is_share(gpus: GpuRequirements) -> bool:
    """True for a job to which a part of one GPU will do."""
    return gpus.is_shared or gpus.gpu_fraction is not None


def requested_models(gpus: GpuRequirements) -> tuple[str, ...]:
    """The GPU models by the names that we have for them, each once, the best first; empty: any."""
    return tuple(dict.fromkeys(gpu_model_name(each) or each for each in gpus.gpu_types))


def share_for(gpus: GpuRequirements, shares: tuple[Share, ...]) -> Share | None:
    """Return the cheapest part that is enough; None: none of those that can be had is."""
    wanted = ShareWanted(
        gpu_models=requested_models(gpus),
        gpu_ratio_min=gpus.gpu_fraction,
        memory_bytes_min=memory_min(gpus.gpu_memory_gb),
    )
    return best_share(wanted, shares)


def memory_min(memory_gib: float | None) -> int | None:
    """GPU memory in bytes, None where any will do."""
    return None if memory_gib is None else math.ceil(memory_gib * GIBIBYTE)


def replica_memory_bytes(share: Share) -> int | None:
    """What has to be asked for besides the resource: replicas are called alike whatever their size."""
    return share.memory_bytes if share.resource == SHARED_GPU_RESOURCE else None


def share_violations(gpus: GpuRequirements, shares: tuple[Share, ...]) -> Iterator[Mistake]:
    """What is wrong with asking for a part of a GPU."""
    field = "gpu_requirements.gpu_fraction"
    if gpus.gpu_fraction is not None and not 0 < gpus.gpu_fraction <= 1:
        yield Mistake(field, f"is {gpus.gpu_fraction:g}; it must be above zero and at most 1, a whole GPU")
    elif gpus.gpu_count != 1:
        yield Mistake("gpu_requirements.gpu_count", f"is {gpus.gpu_count}; a part is of one GPU, so it must be 1")
    elif gpus.gpu_fraction is None and gpus.gpu_memory_gb is None:
        yield Mistake("gpu_requirements.is_shared", "is true, but not how much is enough; add gpu_memory_gb")
    elif share_for(gpus, shares) is None:
        parts = sorted({f"{each.resource} of {each.gpu_model or 'any GPU'}" for each in shares})
        there = f" (there are {', '.join(parts)})" if parts else ": no pool of the policy shares its GPUs"
        yield Mistake(field, f"asks for more than any part of a GPU that can be had{there}")
