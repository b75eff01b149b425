"""Karpenter with its defaults, as far as this world has what it looks at.

Source: karpenter.sh, "Scheduling" and "Disruption"; kubernetes-sigs/karpenter, pkg/controllers/disruption (read
2026-11-21). Pods that wait are batched (1 s without a new one, 10 s at most) and put on new nodes as many to a node as
any type on sale can take; of the types that are left the cheapest offer is bought, spot or not, as the pods allow.
Refused offers are left out for three minutes.

It hears notices (with its interruption queue), drains such nodes at once and buys for their pods beforehand. Nodes are
consolidated at once (`consolidateAfter: 0s`, WhenEmptyOrUnderutilized), each command looked at again after 15 s, within
a budget of a tenth of the nodes: empty ones go; others go when their pods fit elsewhere, or are replaced by one cheaper
node, which has to be ready first. Spot nodes are not replaced by other spot nodes (that needs a gate). Several nodes at
once are tried before one: the longest prefix of the candidates, by how much they disturb, for which it works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_autoscaler.kube import wire
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.sim.baselines.protocol import Act, Buy, Leave
from gpu_autoscaler.sim.baselines.sight import Held, Sight, is_protected

BATCH_IDLE_SECONDS, BATCH_SECONDS_MAX = 1.0, 10.0
REFUSED_SECONDS = 180.0
CONSOLIDATION_SECONDS = 10.0  # between two looks for something to consolidate
VALIDATED_SECONDS = 15.0
NOMINATED_SECONDS = 20.0  # a node that was chosen for pods is left alone for so long
BUDGET_RATIO = 0.1
CANDIDATES_COUNT_MAX = 100
INITIALISED_SECONDS_MAX = 900.0


@dataclass(frozen=True, slots=True)
class _Command:
    """Nodes to go, and what is to take their place."""

    tokens: tuple[str, ...]
    replacement: Offer | None
    found_at: float


class _Claim:
    """A node to be: the pods on it, and the offers that could still be it."""

    def __init__(self, offers: Sequence[Offer], sight: Sight) -> None:
        self.slots = [sight.slot_of_offer(offer) for offer in offers]
        self.wanted: Resources = NO_RESOURCES

    def add(self, pod: wire.Pod, wanted: Resources) -> bool:
        """Put the pod on it if any offer is left that takes all; returns whether."""
        left = [slot for slot in self.slots if slot.takes(pod, self.wanted + wanted)]
        if not left:
            return False
        self.slots, self.wanted = left, self.wanted + wanted
        return True

    def cheapest(self) -> Offer:
        """What is bought."""
        return min((slot.offer for slot in self.slots), key=lambda one: (one.price_micro_usd_per_hour or 0, one.key))


class Karpenter:
    """Buys the cheapest that fits, and goes on looking for something cheaper."""

    name = "karpenter-like"
    scan_seconds = 1.0

    def __init__(self) -> None:
        self._bought_count = 0
        self._batch_began_at: float | None = None
        self._batch_grew_at = 0.0
        self._batch: frozenset[str] = frozenset()
        self._nominated_until: dict[str, float] = {}
        self._consolidates_at = 0.0
        self._validating: _Command | None = None
        self._replacing: tuple[_Command, str] | None = None  # and the token of the replacement
        self._fruitless: object = None  # what was seen when there was nothing to do
        self._seen: tuple[int, int, int] | None = None

    def look(self, sight: Sight) -> Iterable[Act]:
        """Answer notices, provision, consolidate."""
        now = sight.now_seconds
        is_same = self._seen == sight.version and self._batch_began_at is None
        if is_same and now < self._consolidates_at:
            return
        self._seen = sight.version
        yield from self._answer_notices(sight)
        yield from self._provision(sight)
        if now >= self._consolidates_at:
            self._consolidates_at = now + CONSOLIDATION_SECONDS
            yield from self._consolidate(sight)

    # ---- provisioning

    @staticmethod
    def _answer_notices(sight: Sight) -> Iterable[Act]:
        for held in sight.held():
            if held.has_notice and not held.is_leaving:
                yield Leave(token=held.token)

    def _provision(self, sight: Sight) -> Iterable[Act]:
        waiting = [*sight.pending(), *self._losing_their_node(sight)]
        if not self._is_batch_complete(frozenset(pod.metadata.uid for pod in waiting), sight.now_seconds):
            return
        slots, claims = sight.slots(), list[_Claim]()
        offers = _buyable(sight)
        for pod in sorted(waiting, key=lambda one: _by_size(sight.wanted(one)), reverse=True):
            wanted = sight.wanted(pod)
            slot = next((one for one in slots if one.takes(pod, wanted)), None)
            if slot is not None:
                slot.put(wanted)
                self._nominated_until[slot.name] = sight.now_seconds + NOMINATED_SECONDS
            elif not any(claim.add(pod, wanted) for claim in claims):
                claim = _Claim(offers, sight)
                if claim.add(pod, wanted):
                    claims.append(claim)
        yield from (self._buy(claim.cheapest()) for claim in claims)

    def _is_batch_complete(self, uids: frozenset[str], now: float) -> bool:
        """True when pods wait and the window for more has closed."""
        if not uids:
            self._batch, self._batch_began_at = uids, None
            return False
        if self._batch_began_at is None:
            self._batch_began_at = self._batch_grew_at = now
        elif uids - self._batch:
            self._batch_grew_at = now
        self._batch = uids
        is_closed = now - self._batch_grew_at >= BATCH_IDLE_SECONDS or now - self._batch_began_at >= BATCH_SECONDS_MAX
        if is_closed:
            self._batch_began_at = None
        return is_closed

    @staticmethod
    def _losing_their_node(sight: Sight) -> list[wire.Pod]:
        """Pods on nodes that leave: they will want room elsewhere."""
        pods = sight.pods_by_node()
        names = [held.node.metadata.name for held in sight.held() if held.is_leaving and held.node is not None]
        return [pod for name in names for pod in pods.get(name, [])]

    def _buy(self, offer: Offer) -> Buy:
        self._bought_count += 1
        return Buy(offer=offer, token=f"claim-{self._bought_count}")

    # ---- disruption

    def _consolidate(self, sight: Sight) -> Iterable[Act]:
        if self._replacing is not None:
            yield from self._finish_replacing(sight, *self._replacing)
            return
        if self._validating is not None:
            command, self._validating = self._validating, None
            if sight.now_seconds - command.found_at < VALIDATED_SECONDS:
                self._validating = command
            elif self._still_holds(command, sight):
                yield from self._execute(command)
            return
        # Where nothing was found, nothing is looked for until something changes, or a nomination ends.
        looked_at = (sight.version, frozenset(self._nominated(sight.now_seconds)))
        if looked_at != self._fruitless:
            self._validating = self._find(sight)
            self._fruitless = looked_at if self._validating is None else None

    def _find(self, sight: Sight) -> _Command | None:
        """Return the next thing worth doing: empty nodes, several for one, one for less."""
        candidates = self._candidates(sight)
        allowed_count = self._allowed_count(sight)
        if not candidates or not allowed_count or sight.pending():
            return None
        pods, now = sight.pods_by_node(), sight.now_seconds
        empty = [held.token for held in candidates if not _pods_of(held, pods)]
        if empty:
            return _Command(tuple(empty[:allowed_count]), None, now)
        for count in range(min(allowed_count, len(candidates)), 1, -1):
            found = self._simulate(candidates[:count], sight)
            if found is not None:
                return found
        singles = (self._simulate([held], sight) for held in candidates[:CANDIDATES_COUNT_MAX])
        return next((found for found in singles if found is not None), None)

    def _candidates(self, sight: Sight) -> list[Held]:
        """Nodes that may be disrupted, those that disturb least first."""
        pods, nominated = sight.pods_by_node(), self._nominated(sight.now_seconds)
        found = [
            held
            for held in sight.held()
            if held.is_usable
            and not held.is_leaving
            and not held.has_notice
            and held.token not in nominated
            and not any(is_protected(pod) or sight.is_blocked(pod) for pod in _pods_of(held, pods))
        ]
        return sorted(found, key=lambda held: (len(_pods_of(held, pods)), held.launched_seconds, held.token))

    def _nominated(self, now: float) -> set[str]:
        return {token for token, until in self._nominated_until.items() if until > now}

    @staticmethod
    def _allowed_count(sight: Sight) -> int:
        """A tenth of the initialised nodes, rounded up, less those that are not ready or leave already."""
        held = sight.held()
        initialised = sum(each.is_usable for each in held)
        going = sum(each.is_leaving or each.has_notice for each in held)
        return max(0, -int(-initialised * BUDGET_RATIO // 1) - going)

    def _simulate(self, leaving: Sequence[Held], sight: Sight) -> _Command | None:
        """Return the command that removes these nodes, if their pods fit elsewhere or on one cheaper node."""
        tokens = frozenset(held.token for held in leaving)
        by_node = sight.pods_by_node()
        pods = [pod for held in leaving for pod in _pods_of(held, by_node)]
        slots = sight.slots(without=tokens, coming=False)
        claim: _Claim | None = None
        for pod in sorted(pods, key=lambda one: _by_size(sight.wanted(one)), reverse=True):
            wanted = sight.wanted(pod)
            slot = next((one for one in slots if one.takes(pod, wanted)), None)
            if slot is not None:
                slot.put(wanted)
                continue
            if claim is None:
                claim = _Claim(self._cheaper_than(leaving, sight), sight)
            if not claim.add(pod, wanted):
                return None
        return _Command(tuple(sorted(tokens)), None if claim is None else claim.cheapest(), sight.now_seconds)

    @staticmethod
    def _cheaper_than(leaving: Sequence[Held], sight: Sight) -> list[Offer]:
        price = sum(held.offer.price_micro_usd_per_hour or 0 for held in leaving)
        if all(held.offer.capacity_type is CapacityType.SPOT for held in leaving):
            return []
        return [offer for offer in _buyable(sight) if (offer.price_micro_usd_per_hour or 0) < price]

    def _still_holds(self, command: _Command, sight: Sight) -> bool:
        candidates = {held.token: held for held in self._candidates(sight)}
        leaving = [candidates[token] for token in command.tokens if token in candidates]
        if len(leaving) < len(command.tokens) or self._allowed_count(sight) < len(leaving) or sight.pending():
            return False
        again = self._simulate(leaving, sight)
        return again is not None and again.replacement == command.replacement

    def _execute(self, command: _Command) -> Iterable[Act]:
        if command.replacement is None:
            yield from (Leave(token=token) for token in command.tokens)
            return
        bought = self._buy(command.replacement)
        self._replacing = (command, bought.token)
        yield bought

    def _finish_replacing(self, sight: Sight, command: _Command, token: str) -> Iterable[Act]:
        """The old nodes go once the replacement is ready; they stay if it does not come."""
        held = {each.token: each for each in sight.held()}
        replacement = held.get(token)
        if replacement is None or sight.now_seconds - replacement.launched_seconds > INITIALISED_SECONDS_MAX:
            self._replacing = None
        elif replacement.is_usable:
            self._replacing = None
            self._nominated_until[token] = sight.now_seconds + NOMINATED_SECONDS
            yield from (Leave(token=one) for one in command.tokens if one in held)


def _buyable(sight: Sight) -> list[Offer]:
    return [
        offer
        for offer in sight.offers
        if sight.now_seconds - sight.refused_at.get(offer.key, -REFUSED_SECONDS) >= REFUSED_SECONDS
    ]


def _pods_of(held: Held, pods: dict[str, list[wire.Pod]]) -> list[wire.Pod]:
    return [] if held.node is None else pods.get(held.node.metadata.name, [])


def _by_size(wanted: Resources) -> tuple[int, int, int]:
    return wanted.cpu_milli, wanted.memory_bytes, wanted.gpu_count
