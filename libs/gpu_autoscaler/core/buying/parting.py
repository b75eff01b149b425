"""Work whose pods have rules about each other, in parts that a fleet can be chosen for.

Pods that are to be even over zones get their zones before anything is bought: each, the oldest first, goes to the
cheapest that the rules leave it, so that they hold wherever a limit stops. Pods that keep apart on hosts are of one
group, of which a node takes one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gpu_autoscaler.core.buying.market import Market
from gpu_autoscaler.core.fleet.problem import NO_GROUP
from gpu_autoscaler.core.placement import Room
from gpu_autoscaler.core.placing.company import Company, Tally
from gpu_autoscaler.core.placing.shapes import Shape
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.observed import Instant


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one shape, and since when each of them waits."""

    shape: Shape
    sinces: tuple[Instant, ...]  # the oldest first


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some members of a want."""

    want: int  # its number
    shape: Shape  # as wanted, with the zone that the rules leave it among its demands
    sinces: tuple[Instant, ...]


def parts_of(wants: Sequence[Want], market: Market, room: Room) -> tuple[Part, ...]:
    """Return the members of all wants in parts; those that a rule leaves no zone are in none."""
    evens = {number: want.shape for number, want in enumerate(wants) if want.shape.company.evens}
    if not evens:
        return tuple(Part(want=number, shape=want.shape, sinces=want.sinces) for number, want in enumerate(wants))
    zones = _Zones(room, evens, market)
    zoned: dict[tuple[int, str], list[Instant]] = {}
    waiting = sorted((since, each) for each in evens for since in wants[each].sinces)
    for since, number in waiting:
        zone = zones.next(number)
        if zone is not None:
            zoned.setdefault((number, zone), []).append(since)
    parts = [
        Part(want=number, shape=want.shape, sinces=want.sinces)
        for number, want in enumerate(wants)
        if number not in evens
    ]
    parts += [
        Part(want=number, shape=_bound(wants[number].shape, zone), sinces=tuple(sinces))
        for (number, zone), sinces in sorted(zoned.items())
    ]
    return tuple(sorted(parts, key=lambda part: part.want))


def _bound(shape: Shape, zone: str) -> Shape:
    """The shape for one zone alone."""
    selector = dict(shape.demands.node_selector) | {labels.ZONE: zone}
    demands = msgspec.structs.replace(shape.demands, node_selector=tuple(sorted(selector.items())))
    return msgspec.structs.replace(shape, demands=demands)


def groups_of(companies: Sequence[Company]) -> list[int]:
    """Return a group for each company, NO_GROUP for those that mind nobody on their host.

    Companies that keep away from any same pods are of one group.
    """
    group_of: dict[Tally, int] = {}
    for number, company in enumerate(companies):
        tallies = [near.tally for near in company.apart]
        joined = {group_of[tally] for tally in tallies if tally in group_of}
        own = min(joined, default=number)
        if len(joined) > 1:
            group_of.update({tally: own for tally, group in group_of.items() if group in joined})
        group_of.update(dict.fromkeys(tallies, own))
    return [group_of[each.apart[0].tally] if each.apart else NO_GROUP for each in companies]


class _Zones:
    """Hands out zones, so that every rule of evenness holds after each pod."""

    def __init__(self, room: Room, shapes: Mapping[int, Shape], market: Market) -> None:
        tallies = {even.tally for shape in shapes.values() for even in shape.company.evens}
        self._stand: dict[Tally, Counter[str]] = {
            tally: Counter(room.counts_by_domain(labels.ZONE, tally)) for tally in tallies
        }
        self._companies = {number: shape.company for number, shape in shapes.items()}
        self._prices = {number: _cheapest_by_zone(market, shape) for number, shape in shapes.items()}
        # Zones that count for the rule although nothing may be bought there: nodes stand there that would do.
        self._eligible: dict[int, AbstractSet[str]] = {
            number: room.domains_of(shape, labels.ZONE) | self._prices[number].keys()
            for number, shape in shapes.items()
        }

    def next(self, number: int) -> str | None:
        """The zone for one more pod of this want: the cheapest that the rules leave open; None: all are barred."""
        company, prices = self._companies[number], self._prices[number]
        allowed = (zone for zone in prices if self._is_even(number, zone))
        chosen = min(allowed, key=lambda zone: (prices[zone], self._most(company, zone), zone), default=None)
        if chosen is not None:
            for tally in company.tallies:
                if tally in self._stand:
                    self._stand[tally][chosen] += 1
        return chosen

    def _most(self, company: Company, zone: str) -> int:
        return max(self._stand[even.tally][zone] for even in company.evens)

    def _is_even(self, number: int, zone: str) -> bool:
        for even in self._companies[number].evens:
            stand = self._stand[even.tally]
            if stand[zone] + 1 - min(stand[each] for each in self._eligible[number]) > even.skew_count_max:
                return False
        return True


def _cheapest_by_zone(market: Market, shape: Shape) -> dict[str, int]:
    """Prices in micro-dollars an hour, of zones in which a node may be bought for the shape."""
    takes, micro_usd = market.members(shape) > 0, market.prices_micro_usd_per_hour
    found = {zone: micro_usd[takes & is_there] for zone, is_there in market.is_in_zone.items()}
    return {zone: int(prices.min()) for zone, prices in found.items() if prices.size}
