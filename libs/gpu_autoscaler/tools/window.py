"""The last facts of a cluster that is looked on at, and as a state what came before them: for `observe`, which may
look on for weeks and must not grow with them.
"""

from datetime import datetime

from msgspec.structs import replace

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.recording import Head, Recording

# Of a fact some two kilobytes are kept, so four hundred megabytes in all. Source: measured, observed pods as decoded.
FACTS_COUNT_MAX = 200_000
# So much goes at once when there are too many: folding a few at a time would cost more.
_SHARE_DROPPED = 0.25


class Window:
    """Facts from `from_at` on, at most `facts_count_max` of them; older ones are folded together."""

    def __init__(self, from_at: datetime, facts_count_max: int = FACTS_COUNT_MAX) -> None:
        """An offer of a price list counts as a fact, unless the list before has it as well."""
        assert facts_count_max > 0, "a window without facts shows nothing"  # noqa: S101 - checked by the command
        self.from_at = from_at
        self.facts_count_max = facts_count_max
        self.facts_count = 0
        self._facts: list[tuple[Stored, int]] = []  # each with what it counts for
        self._before: ClusterState = EMPTY_STATE
        self._sequences: dict[str, int] = {}
        self._prices: tuple[Offer, ...] = ()

    def add(self, recorded: Recorded, at: datetime) -> bool:
        """Take a fact in; True where the oldest ones had to leave for it."""
        recorded, count = self._counted(recorded)
        self._facts.append((Stored(at=at, recorded=recorded), count))
        self.facts_count += count
        is_full = self.facts_count > self.facts_count_max
        if is_full:
            self._drop()
        return is_full

    def recording(self, policy: ScalingPolicy, to_at: datetime) -> Recording:
        """Return what is kept, in the order in which it was stored."""
        head = Head(
            policy=policy, from_at=self.from_at, to_at=to_at, sequences=dict(self._sequences), state=self._before
        )
        return Recording(head=head, facts=tuple(stored for stored, _ in sorted(self._facts, key=_order)))

    def _drop(self) -> None:
        """Streams arrive side by side: the oldest of all are those to go, not those that came first."""
        facts, number = sorted(self._facts, key=_order), 0
        while number < len(facts) and self.facts_count > self.facts_count_max * (1.0 - _SHARE_DROPPED):
            self.facts_count -= facts[number][1]
            number += 1
        gone, self._facts = [stored for stored, _ in facts[:number]], facts[number:]
        self._before = fold(self._before, [each.recorded for each in gone])
        for each in gone:
            stream, sequence = each.recorded.stream, each.recorded.sequence
            self._sequences[stream] = max(sequence, self._sequences.get(stream, 0))
        self.from_at = max(self.from_at, gone[-1].at)

    def _counted(self, recorded: Recorded) -> tuple[Recorded, int]:
        """A price list that says what the one before said becomes the same in memory: they come often, and are long."""
        fact = recorded.fact
        if not isinstance(fact, SpotOffersSampled):
            return recorded, 1
        if fact.offers != self._prices:
            self._prices = fact.offers
            return recorded, 1 + len(fact.offers)
        shared = replace(recorded.envelope, fact=replace(fact, offers=self._prices))
        return replace(recorded, envelope=shared), 1


def _order(each: tuple[Stored, int]) -> tuple[datetime, str, int]:
    return each[0].at, each[0].recorded.stream, each[0].recorded.sequence
