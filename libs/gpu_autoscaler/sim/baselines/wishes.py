"""The work of a scene as one who knows it all beforehand sees it: when each pod would run if it never waited."""

from collections.abc import Iterable, Sequence

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.gpu import gpu_model_name
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources, parse_quantity, parse_quantity_milli
from gpu_autoscaler.sim.scene import Scene, Serving

_Shape = tuple[Resources, str | None, bool]
_QUARTERS = range(5)
# Of GPUs, CPU and memory, in quarters that sum to one.
_WEIGHTS = tuple((gpu / 4, cpu / 4, (4 - gpu - cpu) / 4) for gpu in _QUARTERS for cpu in _QUARTERS if gpu + cpu <= 4)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One pod, from when it is wanted until it would have ended."""

    from_seconds: float
    to_seconds: float
    resources: Resources
    gpu_model: str | None
    is_on_spot: bool  # may it run there

    def is_wanted_at(self, at_seconds: float) -> bool:
        """True while it would run."""
        return self.from_seconds <= at_seconds < self.to_seconds

    def size(self) -> tuple[int, int, int]:
        """Larger ones are packed first."""
        return self.resources.gpu_count, self.resources.cpu_milli, self.resources.memory_bytes


def wishes_of(scene: Scene) -> tuple[Wish, ...]:
    """Return every pod of the scene."""
    jobs = [
        wish
        for arrival in scene.arrivals
        for wish in [_of_job(arrival.at_seconds, arrival.request)] * arrival.request.members
    ]
    replicas = [wish for one in scene.servings for wish in [_of_serving(one, scene.hours)] * one.replicas_count]
    return (*jobs, *replicas)


def fits_on(wish: Wish, offer: Offer) -> bool:
    """True when an empty node of this offer takes the pod."""
    is_right = wish.gpu_model in (None, offer.gpu_model)
    may_run = wish.is_on_spot or offer.capacity_type is not CapacityType.SPOT
    return is_right and may_run and wish.resources.fits_in(offer.resources)


def cheapest_fleet(wishes: Iterable[Wish], offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return nodes that take all of them at once: the largest first, each onto the node that is fullest, else onto a
    new one of which its share of GPUs (of CPU for one without) is cheapest."""
    nodes: list[tuple[Offer, Resources]] = []
    for wish in sorted(wishes, key=Wish.size, reverse=True):
        open_nodes = [
            (free.gpu_count, free.cpu_milli, number)
            for number, (offer, free) in enumerate(nodes)
            if fits_on(wish, offer) and wish.resources.fits_in(free)
        ]
        if open_nodes:
            number = min(open_nodes)[2]
            offer, free = nodes[number]
            nodes[number] = (offer, free - wish.resources)
            continue
        fitting = [offer for offer in offers if fits_on(wish, offer)]
        if not fitting:
            raise ValueError(f"nothing on sale takes {wish.resources}")
        offer = min(fitting, key=lambda one: (_share_micro_usd(wish, one), one.price_micro_usd_per_hour or 0, one.key))
        nodes.append((offer, offer.resources - wish.resources))
    return tuple(offer for offer, _ in nodes)


def _share_micro_usd(wish: Wish, offer: Offer) -> float:
    """What the pod's part of the node costs an hour: the larger of its shares of GPUs, CPU and memory."""
    wanted, whole = wish.resources, offer.resources
    shares = [wanted.cpu_milli / whole.cpu_milli, wanted.memory_bytes / whole.memory_bytes]
    if whole.gpu_count:
        # A pod without GPUs on a node with GPUs takes the node all the same, once its CPU is full.
        shares.append(wanted.gpu_count / whole.gpu_count)
    return max(shares) * (offer.price_micro_usd_per_hour or 0)


def floor_micro_usd(wishes: Sequence[Wish], offers: Sequence[Offer]) -> float:
    """Return what the work must cost at least, whoever plans it and however long it may wait.

    Each pod pays for its share of a node, on the offer where that is cheapest, for as long as it runs. A share is the
    weighted mean of its shares of GPUs, CPU and memory. The pods of a node never have more than all of each, so their
    shares never sum to more than the node: no plan is cheaper. That holds for any weights; the best of a grid is taken.
    """
    hours: dict[_Shape, float] = {}
    example: dict[_Shape, Wish] = {}
    for wish in wishes:
        key = (wish.resources, wish.gpu_model, wish.is_on_spot)
        hours[key] = hours.get(key, 0.0) + (wish.to_seconds - wish.from_seconds) / 3600.0
        example[key] = wish
    fitting = {key: [offer for offer in offers if fits_on(wish, offer)] for key, wish in example.items()}
    return max(
        sum(
            hours[key] * min(_weighted_micro_usd(wish.resources, offer, weights) for offer in fitting[key])
            for key, wish in example.items()
        )
        for weights in _WEIGHTS
    )


def _weighted_micro_usd(wanted: Resources, offer: Offer, weights: tuple[float, float, float]) -> float:
    """What a weighted share of the node costs an hour; a node without GPUs has only CPU and memory to share."""
    of_gpu, of_cpu, of_memory = weights
    whole, price = offer.resources, offer.price_micro_usd_per_hour or 0
    share = of_cpu * wanted.cpu_milli / whole.cpu_milli + of_memory * wanted.memory_bytes / whole.memory_bytes
    if whole.gpu_count:
        return price * (share + of_gpu * wanted.gpu_count / whole.gpu_count)
    return price * (share / (of_cpu + of_memory) if of_cpu + of_memory else wanted.cpu_milli / whole.cpu_milli)


def _of_job(at_seconds: float, request: JobRequested) -> Wish:
    gpus, asked = request.gpu_requirements, request.resources
    assert request.run_seconds is not None, "a scene's jobs say how long they take"  # noqa: S101 - a bug of the scene
    return Wish(
        from_seconds=at_seconds,
        to_seconds=at_seconds + request.run_seconds,
        resources=Resources(
            cpu_milli=parse_quantity_milli(asked.cpu),
            memory_bytes=parse_quantity(asked.memory),
            gpu_count=gpus.gpu_count,
            ephemeral_storage_bytes=parse_quantity(asked.ephemeral_storage),
            pod_count=1,
        ),
        gpu_model=gpu_model_name(gpus.gpu_types[0]) if gpus.gpu_types else None,  # a scene's jobs name one at most
        is_on_spot=request.preemptible,
    )


def _of_serving(serving: Serving, hours: float) -> Wish:
    return Wish(
        from_seconds=serving.at_seconds,
        to_seconds=hours * 3600.0,
        resources=Resources(cpu_milli=1000, memory_bytes=2 * 2**30, gpu_count=serving.gpu_count, pod_count=1),
        gpu_model=None,
        is_on_spot=True,
    )
