"""GPUs that several pods share: what a pool cuts its GPUs into, and which share is right for a job that needs no whole
GPU. Called by the market, by admission and by the check of policies.

Who does the cutting is the GPU operator on the node: the order's labels name its configuration.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.mig import PROFILE_NAMES, can_be_cut, geometry, most_of
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import MIG_RESOURCE_PREFIX, SHARED_GPU_RESOURCE, Resources, Slices

_MEBIBYTE = 2**20
_EIGHTHS = 8  # of a GPU, in memory: its smallest slice
_ROUNDING = 1e-9


class GpuSharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How each GPU of a pool's nodes is shared: by MIG profiles, or by replicas; whole GPUs are not to be had there."""

    mig_profiles: Annotated[
        tuple[str, ...],
        Meta(description="What each GPU is cut into, as often as named (3g.20gb); empty: no MIG. Source: S104."),
    ] = ()
    replicas_count: Annotated[
        Annotated[int, Meta(ge=2, le=48)] | None,
        Meta(description="Pods that share one GPU; none: no replicas. Source: S105, S106."),
    ] = None
    replicas_kind: Annotated[
        Literal["time-slicing", "mps"],
        Meta(description="How replicas share: by turns, or side by side with memory limits. Source: S105, S106."),
    ] = "time-slicing"


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a GPU that can be had."""

    resource: str  # what a pod asks for: nvidia.com/mig-1g.5gb, nvidia.com/gpu.shared
    gpu_model: str | None
    memory_bytes: int  # that one pod can count on
    gpu_ratio: float  # of the GPU's memory
    price_micro_usd_per_hour: float | None = None  # of this part alone; None: of a node that nobody sells


class ShareWanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a job that needs no whole GPU asks for."""

    gpu_models: tuple[str, ...]  # any of these; empty: any at all
    gpu_ratio_min: float | None  # of a GPU's memory; None: any
    memory_bytes_min: int | None  # None: any


def slices_of(sharing: GpuSharing, offer: Offer) -> Slices | None:
    """What a node of the offer has instead of its GPUs; None: its GPUs cannot be shared like this."""
    gpus = offer.resources.gpu_count
    if not gpus:
        return None
    if sharing.replicas_count is not None:
        return ((SHARED_GPU_RESOURCE, gpus * sharing.replicas_count),)
    if not can_be_cut(geometry(offer.gpu_model, offer.gpu_memory_bytes), sharing.mig_profiles):
        return None
    counts = Counter(sharing.mig_profiles)
    return tuple(sorted((f"{MIG_RESOURCE_PREFIX}{name}", count * gpus) for name, count in counts.items()))


def sharing_labels(sharing: GpuSharing, offer: Offer) -> dict[str, str]:
    """Labels by which the GPU operator on the node knows how to share its GPUs.

    `all-1g.5gb` is the operator's own name for a GPU that is full of one profile; other sets need a configuration of
    ours: `1x3g.20gb_4x1g.5gb` (NVIDIA mig-parted, "config.yaml"; GPU operator, "Time-Slicing GPUs", read 2026-11-21).
    """
    if sharing.replicas_count is not None:
        found = {labels.DEVICE_PLUGIN_CONFIG: f"{sharing.replicas_kind}-{sharing.replicas_count}"}
        if offer.gpu_memory_bytes is not None:
            share_mebibytes = offer.gpu_memory_bytes // sharing.replicas_count // _MEBIBYTE
            found[labels.GPU_SHARE_MEMORY] = str(share_mebibytes)
        return found
    counts = sorted(Counter(sharing.mig_profiles).items())
    if len(counts) == 1:
        name, count = counts[0]
        if count == most_of(geometry(offer.gpu_model, offer.gpu_memory_bytes), name):
            return {labels.MIG_CONFIG: f"all-{name}"}
    return {labels.MIG_CONFIG: "_".join(f"{count}x{name}" for name, count in counts)}


def shares_of(sharing: GpuSharing, offer: Offer) -> tuple[Share, ...]:
    """The parts that a node of the offer would have, each kind once; none where nobody knows the GPU's memory."""
    slices, memory = slices_of(sharing, offer), offer.gpu_memory_bytes
    if not slices or memory is None:
        return ()
    whole = offer.price_micro_usd_per_hour
    price = None if whole is None else whole / offer.resources.gpu_count  # what is unknown is not free
    found = []
    for resource, _ in slices:
        memory_bytes = _memory_bytes(resource, sharing, memory)
        ratio = memory_bytes / memory
        found.append(
            Share(
                resource=resource,
                gpu_model=offer.gpu_model,
                memory_bytes=memory_bytes,
                gpu_ratio=ratio,
                price_micro_usd_per_hour=None if price is None else price * ratio,
            )
        )
    return tuple(found)


def shares_on(node: NodeObserved) -> Iterator[Share]:
    """The parts of GPUs that a node has, whoever cut them; those of unknown size are left out."""
    known = dict(node.labels)
    for resource, _ in node.allocatable.slices:
        whole = node.gpu_memory_bytes
        if resource == SHARED_GPU_RESOURCE:
            # Only our own nodes say it, and a job that asks for so much insists on their label.
            mebibytes = known.get(labels.GPU_SHARE_MEMORY, "")
            memory_bytes = int(mebibytes) * _MEBIBYTE if mebibytes.isdigit() else 0
        else:
            memory_bytes = _mig_gigabytes(resource) * GIBIBYTE
        if memory_bytes and whole:
            yield Share(
                resource=resource,
                gpu_model=node.gpu_model,
                memory_bytes=memory_bytes,
                gpu_ratio=memory_bytes / whole,
            )


def gpu_units(amounts: Resources, node: Resources, gpu_memory_bytes: int | None) -> int:
    """How much of a node's GPUs an amount is, in units that fit the node: what is held is paid for by it.

    GPUs of a node without slices count one each, replicas of a GPU too, and slices by the memory in their names, so
    that what a GPU is cut into pays for the whole of it.
    """
    if not node.slices:
        return amounts.gpu_count
    smallest = min(_units_of_slice(name) for name, _ in node.slices)
    whole = _EIGHTHS * smallest if gpu_memory_bytes is None else max(1, round(gpu_memory_bytes / GIBIBYTE))
    return amounts.gpu_count * whole + sum(count * _units_of_slice(name) for name, count in amounts.slices)


def _units_of_slice(resource: str) -> int:
    return 1 if resource == SHARED_GPU_RESOURCE else max(1, _mig_gigabytes(resource))


def _memory_bytes(resource: str, sharing: GpuSharing, memory: int) -> int:
    if sharing.replicas_count is not None:
        return memory // sharing.replicas_count
    return _mig_gigabytes(resource) * GIBIBYTE


def _mig_gigabytes(resource: str) -> int:
    """`nvidia.com/mig-1g.5gb` has 5, `nvidia.com/mig-1g.10gb.me` 10; 0 where the name does not say it."""
    said = resource.removeprefix(MIG_RESOURCE_PREFIX).partition(".")[2].partition("gb")[0]
    return int(said) if said.isdigit() else 0


def best_share(wanted: ShareWanted, shares: Iterable[Share]) -> Share | None:
    """The cheapest part that is enough; of equals the one with least memory, then by name. None: there is none.

    What can be bought at a known price comes before the rest: of what is only there no more will come, and what has no
    price is not free.
    """
    return min((share for share in shares if _is_enough(wanted, share)), key=_by_price, default=None)


def _by_price(share: Share) -> tuple[bool, float, int, str]:
    price = share.price_micro_usd_per_hour
    return price is None, price or 0.0, share.memory_bytes, share.resource


def _is_enough(wanted: ShareWanted, share: Share) -> bool:
    if wanted.gpu_models and share.gpu_model not in wanted.gpu_models:
        return False
    if wanted.memory_bytes_min is not None and share.memory_bytes < wanted.memory_bytes_min:
        return False
    return wanted.gpu_ratio_min is None or share.gpu_ratio >= wanted.gpu_ratio_min - _ROUNDING


def sharing_mistakes(sharing: GpuSharing, at: str, offers: tuple[Offer, ...] | None) -> Iterator[str]:
    """What cannot be meant of a pool's sharing."""
    if (sharing.replicas_count is None) == (not sharing.mig_profiles):
        yield f"{at}: set either mig_profiles or replicas_count: a GPU is cut into slices, or has replicas"
        return
    unknown = sorted(set(sharing.mig_profiles) - PROFILE_NAMES)
    for name in unknown:
        yield f"{at}.mig_profiles: there is no profile {name!r}; there are {', '.join(sorted(PROFILE_NAMES))}"
    if unknown or offers is None:
        return
    if not any(slices_of(sharing, offer) for offer in offers):
        yield f"{at}.mig_profiles: no GPU for sale in this pool can be cut into {', '.join(sharing.mig_profiles)}"
