"""Shared GPUs: MIG slices and replicas of a pool, and the cheapest share for a job that needs no whole GPU.

The GPU operator on the node partitions the GPUs; labels of the launch request name its configuration.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.ranges import about
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE, MIG_PROFILE_NAMES, can_partition, max_slices, mig_profiles_of
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import MIG_RESOURCE_PREFIX, SHARED_GPU_RESOURCE, Resources, Slices

_MEBIBYTE = 2**20
_EIGHTHS = 8  # of a GPU, in memory: its smallest slice
_ROUNDING = 1e-9


class GpuSharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the GPUs of a pool are shared: by MIG profiles or by replicas. Its nodes offer no whole GPUs."""

    mig_profiles: Annotated[
        tuple[str, ...],
        about("MIG profiles of each GPU, one entry per slice (3g.20gb); empty: no MIG.", "#gpu-fractions"),
    ] = ()
    replicas_count: Annotated[
        Annotated[int, Meta(ge=2, le=48)] | None,
        about("Number of pods that share one GPU; unset: no replicas.", "#gpu-fractions"),
    ] = None
    replicas_kind: Annotated[
        Literal["time-slicing", "mps"],
        about("How replicas share a GPU: time-slicing, or MPS with memory limits.", "#gpu-fractions"),
    ] = "time-slicing"


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """An available share of a GPU."""

    resource: str  # requested by the pod: nvidia.com/mig-1g.5gb, nvidia.com/gpu.shared
    gpu_model: str | None
    memory_bytes: int  # guaranteed to one pod
    gpu_ratio: float  # of the GPU's memory
    price_micro_usd_per_hour: float | None = None  # of this share; None: the node is not among the offers


class ShareWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a job that needs no whole GPU."""

    gpu_models: tuple[str, ...]  # any of these; empty: any at all
    gpu_ratio_min: float | None  # of a GPU's memory; None: any
    memory_bytes_min: int | None  # None: any


def slices_of(sharing: GpuSharing, offer: Offer) -> Slices | None:
    """Return the slices of a node of the offer; None: its GPUs do not support this sharing."""
    gpus = offer.resources.gpu_count
    if not gpus:
        return None
    if sharing.replicas_count is not None:
        return ((SHARED_GPU_RESOURCE, gpus * sharing.replicas_count),)
    if not can_partition(mig_profiles_of(offer.gpu_model, offer.gpu_memory_bytes), sharing.mig_profiles):
        return None
    counts = Counter(sharing.mig_profiles)
    return tuple(sorted((f"{MIG_RESOURCE_PREFIX}{name}", count * gpus) for name, count in counts.items()))


def sharing_labels(sharing: GpuSharing, offer: Offer) -> dict[str, str]:
    """Return the labels that configure the GPU operator on the node.

    `all-1g.5gb` is the operator's built-in name for a GPU filled with one profile; other sets need a custom
    configuration: `1x3g.20gb_4x1g.5gb` (NVIDIA mig-parted, "config.yaml"; GPU operator, "Time-Slicing GPUs", read
    2026-11-21).
    """
    if sharing.replicas_count is not None:
        node_labels = {labels.DEVICE_PLUGIN_CONFIG: f"{sharing.replicas_kind}-{sharing.replicas_count}"}
        if offer.gpu_memory_bytes is not None:
            share_mebibytes = offer.gpu_memory_bytes // sharing.replicas_count // _MEBIBYTE
            node_labels[labels.GPU_SHARE_MEMORY] = str(share_mebibytes)
        return node_labels
    counts = sorted(Counter(sharing.mig_profiles).items())
    if len(counts) == 1:
        name, count = counts[0]
        if count == max_slices(mig_profiles_of(offer.gpu_model, offer.gpu_memory_bytes), name):
            return {labels.MIG_CONFIG: f"all-{name}"}
    return {labels.MIG_CONFIG: "_".join(f"{count}x{name}" for name, count in counts)}


def shares_of(sharing: GpuSharing, offer: Offer) -> tuple[Share, ...]:
    """Return the shares of a node of the offer, each kind once; empty if the memory of the GPU is unknown."""
    slices, memory = slices_of(sharing, offer), offer.gpu_memory_bytes
    if not slices or memory is None:
        return ()
    whole = offer.price_micro_usd_per_hour
    price = None if whole is None else whole / offer.resources.gpu_count  # an unknown price is not free
    shares, replicas = [], sharing.replicas_count
    for resource, _ in slices:
        memory_bytes = memory // replicas if replicas is not None else _mig_gigabytes(resource) * GIBIBYTE
        ratio = memory_bytes / memory
        shares.append(
            Share(
                resource=resource,
                gpu_model=offer.gpu_model,
                memory_bytes=memory_bytes,
                gpu_ratio=ratio,
                price_micro_usd_per_hour=None if price is None else price * ratio,
            )
        )
    return tuple(shares)


def shares_on(node: NodeObserved) -> Iterator[Share]:
    """Yield the shares of a node, whoever partitioned it; shares of unknown size are omitted."""
    known = dict(node.labels)
    for resource, _ in node.allocatable.slices:
        whole = node.gpu_memory_bytes
        if resource == SHARED_GPU_RESOURCE:
            # Only managed nodes have this label; a job with a memory requirement selects by it.
            mebibytes = known.get(labels.GPU_SHARE_MEMORY, "")
            memory_bytes = int(mebibytes) * _MEBIBYTE if mebibytes.isdigit() else 0
        else:
            memory_bytes = _mig_gigabytes(resource) * GIBIBYTE
        if memory_bytes and whole:
            yield Share(
                resource=resource, gpu_model=node.gpu_model, memory_bytes=memory_bytes, gpu_ratio=memory_bytes / whole
            )


def gpu_units(amounts: Resources, node: Resources, gpu_memory_bytes: int | None) -> int:
    """Return the amount in cost units of the node's GPUs: one for a GPU or replica; MIG slices count by the memory in
    their names, so that they add up to the whole GPU."""
    if not node.slices:
        return amounts.gpu_count
    smallest = min(_units_of_slice(name) for name, _ in node.slices)
    whole = _EIGHTHS * smallest if gpu_memory_bytes is None else max(1, round(gpu_memory_bytes / GIBIBYTE))
    return amounts.gpu_count * whole + sum(count * _units_of_slice(name) for name, count in amounts.slices)


def member_price(micro_usd_per_hour: int, member: Resources, node: Resources, gpu_memory_bytes: int | None) -> int:
    """Return the price per hour of a member of a node, rounded up, by what the cost tracker allocates to it: its share
    of the GPUs, or of the CPUs of a node without GPUs. Nothing for a member without GPUs on a node with GPUs; the whole
    price where the share is unknown."""
    if member.has_gpus:
        held, units = (gpu_units(amounts, node, gpu_memory_bytes) for amounts in (member, node))
    elif node.has_gpus:
        return 0
    else:
        held, units = member.cpu_milli, node.cpu_milli
    return -(-micro_usd_per_hour * min(held, units) // units) if held and units else micro_usd_per_hour


def gpu_count_min(node: Resources, gpu_memory_bytes: int | None) -> int:
    """Return how many GPUs have this many slices at least; of a replica, which may be any part of a GPU, one each."""
    if not node.slices:
        return node.gpu_count
    if any(name == SHARED_GPU_RESOURCE for name, _ in node.slices):
        return node.gpu_count + sum(count for _, count in node.slices)
    whole = gpu_units(Resources(gpu_count=1), node, gpu_memory_bytes)
    return -(-gpu_units(node, node, gpu_memory_bytes) // whole)


def _units_of_slice(resource: str) -> int:
    return 1 if resource == SHARED_GPU_RESOURCE else max(1, _mig_gigabytes(resource))


def _mig_gigabytes(resource: str) -> int:
    """`nvidia.com/mig-1g.5gb` has 5, `nvidia.com/mig-1g.10gb.me` 10; 0 if the name has none."""
    gigabytes = resource.removeprefix(MIG_RESOURCE_PREFIX).partition(".")[2].partition("gb")[0]
    return int(gigabytes) if gigabytes.isdigit() else 0


def best_share(wanted: ShareWanted, shares: Iterable[Share]) -> Share | None:
    """Return the cheapest sufficient share; of equal price the one with the least memory, then by name. None: none. An
    unknown price comes last: it is not free, and shares on existing nodes cannot be bought again."""
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


def sharing_violations(sharing: GpuSharing, at: str, offers: tuple[Offer, ...] | None) -> Iterator[str]:
    """Yield each contradiction in the sharing of a pool."""
    if (sharing.replicas_count is None) == (not sharing.mig_profiles):
        yield f"{at}: set either mig_profiles or replicas_count"
        return
    unknown = sorted(set(sharing.mig_profiles) - MIG_PROFILE_NAMES)
    for name in unknown:
        yield f"{at}.mig_profiles: unknown profile {name!r}; known: {', '.join(sorted(MIG_PROFILE_NAMES))}"
    if unknown or offers is None:
        return
    if not any(slices_of(sharing, offer) for offer in offers):
        yield f"{at}.mig_profiles: no offered GPU of this pool supports {', '.join(sharing.mig_profiles)}"
