"""Gangs whose members must all be near each other: in one NVLink domain, rack or zone, named by a label of nodes.

Called by `core/scale_up.py` and by the queue. A domain is a value of that label; nodes that could be bought are in one
only where offer or pool says so, as a zone does, and the clique of a node that is not there yet does not.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.placement import Room
from gpu_autoscaler.core.placing.shapes import Shape

# Domains that are tried for one gang in one plan; each try is a purchase that is taken back where it fails.
_TRIES_COUNT_MAX = 16


def bound(shape: Shape, key: str, value: str) -> Shape:
    """The shape for one domain alone."""
    selector = dict(shape.demands.node_selector) | {key: value}
    demands = msgspec.structs.replace(shape.demands, node_selector=tuple(sorted(selector.items())))
    return msgspec.structs.replace(shape, demands=demands)


def domains_for(
    key: str, wanted: Sequence[tuple[Shape, int]], room: Room, market: Market | None, coming: frozenset[str]
) -> tuple[str, ...]:
    """Return the domains in which all these shapes may have a place, so many members of each, in the order in which
    they are tried: where nodes are on their way for them, where there is room for all, then the cheapest.

    Without a market nothing is bought. `coming` are the bins on their way.
    """
    of_each = [room.domains_of(shape, key) for shape, _ in wanted]
    if market is not None:
        of_each = [there | market.domains(shape, key) for there, (shape, _) in zip(of_each, wanted, strict=True)]
    values = frozenset.intersection(*of_each) - {""}
    own = {room[each].labels.get(key) for each in coming if each in room}

    def order(value: str) -> tuple[bool, bool, int, str]:
        in_it = [(bound(shape, key, value), count) for shape, count in wanted]
        has_room = all(room.count_places(shape, count) >= count for shape, count in in_it)
        return value not in own, not has_room, _price(in_it, market), value

    return tuple(sorted(values, key=order)[:_TRIES_COUNT_MAX])


def place_in_one_domain(key: str, shape: Shape, count: int, room: Room) -> tuple[str, ...]:
    """Place all members in the first domain that has room for them, and return their bins; none: no domain has."""
    for value in domains_for(key, ((shape, count),), room, None, frozenset()):
        keys = room.place_gang(bound(shape, key, value), count)
        if keys is not None:
            return keys
    return ()


def _price(wanted: Sequence[tuple[Shape, int]], market: Market | None) -> int:
    """Of the cheapest nodes that take a member of each; zero where none can be had, as then nothing is paid."""
    if market is None:
        return 0
    prices = (market.prices_micro_usd_per_hour[np.flatnonzero(market.members(shape))] for shape, _ in wanted)
    return sum(int(each.min()) for each in prices if each.size)
