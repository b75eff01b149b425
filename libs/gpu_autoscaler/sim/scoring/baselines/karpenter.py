"""Karpenter with default settings, as far as the simulation has its inputs.

Source: karpenter.sh, "Scheduling" and "Disruption"; kubernetes-sigs/karpenter, pkg/controllers/disruption (read
2026-11-21). Pending pods are batched (idle 1 s, at most 10 s) and packed onto as few new nodes as the largest offers
allow; of the offers that fit, the cheapest is bought, spot or on demand as the pods allow. Refused offers are skipped
for three minutes.

It receives interruption notices from its queue, drains such nodes at once and buys for their pods in advance. Nodes are
consolidated at once (`consolidateAfter: 0s`, WhenEmptyOrUnderutilized) within a budget of a tenth of the nodes, and
each command is validated after 15 s: empty nodes are deleted; others are deleted if their pods fit elsewhere, or
replaced by one cheaper node that must be ready first. Spot nodes are not replaced by spot nodes (a feature gate).
Multi-node consolidation is tried first: the longest prefix of the candidates, by disruption cost, that works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import NO_RESOURCES, Resources
from gpu_autoscaler.sim.scoring.baselines.observation import Action, Buy, Drain, Observation, OwnedMachine, is_protected

BATCH_IDLE_SECONDS, BATCH_SECONDS_MAX = 1.0, 10.0
REFUSED_SECONDS = 180.0
CONSOLIDATION_SECONDS = 10.0  # between searches
VALIDATED_SECONDS = 15.0
NOMINATED_SECONDS = 20.0  # a node chosen for pods is not disrupted for this long
BUDGET_RATIO = 0.1
CANDIDATES_COUNT_MAX = 100
INITIALIZED_SECONDS_MAX = 900.0


@dataclass(frozen=True, slots=True)
class _Command:
    """Nodes to remove, and their replacement."""

    tokens: tuple[str, ...]
    replacement: Offer | None
    found_at: float


class _Claim:
    """A node to buy: the pods on it, and the offers that still fit."""

    def __init__(self, offers: Sequence[Offer], observation: Observation) -> None:
        self.slots = [observation.slot_of_offer(offer) for offer in offers]
        self.requests: Resources = NO_RESOURCES

    def add(self, pod: core.Pod, requests: Resources) -> bool:
        """Add the pod if an offer fits all pods; return whether it did."""
        fitting = [slot for slot in self.slots if slot.takes(pod, self.requests + requests)]
        if not fitting:
            return False
        self.slots, self.requests = fitting, self.requests + requests
        return True

    def cheapest(self) -> Offer:
        return min(
            (slot.offer for slot in self.slots), key=lambda offer: (offer.price_micro_usd_per_hour or 0, offer.key)
        )


class Karpenter:
    """Buys the cheapest offer that fits, and consolidates continually."""

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
        self._replacing: tuple[_Command, str] | None = None  # with the token of the replacement
        self._searched_state: object = None  # the state at the last search without result
        self._seen: tuple[int, int, int] | None = None

    def step(self, observation: Observation) -> Iterable[Action]:
        now = observation.now_seconds
        is_same = self._seen == observation.version and self._batch_began_at is None
        if is_same and now < self._consolidates_at:
            return
        self._seen = observation.version
        for machine in observation.machines():
            if machine.has_notice and not machine.is_draining:
                yield Drain(token=machine.token)
        yield from self._provision(observation)
        if now >= self._consolidates_at:
            self._consolidates_at = now + CONSOLIDATION_SECONDS
            yield from self._consolidate(observation)

    # ---- provisioning

    def _provision(self, observation: Observation) -> Iterable[Action]:
        waiting = [*observation.pending(), *self._pods_on_draining(observation)]
        if not self._is_batch_complete(frozenset(pod.metadata.uid for pod in waiting), observation.now_seconds):
            return
        slots, claims = observation.slots(), list[_Claim]()
        offers = _buyable(observation)
        for pod in sorted(waiting, key=lambda pod: _by_size(observation.requests(pod)), reverse=True):
            requests = observation.requests(pod)
            slot = next((slot for slot in slots if slot.takes(pod, requests)), None)
            if slot is not None:
                slot.put(requests)
                self._nominated_until[slot.name] = observation.now_seconds + NOMINATED_SECONDS
            elif not any(claim.add(pod, requests) for claim in claims):
                claim = _Claim(offers, observation)
                if claim.add(pod, requests):
                    claims.append(claim)
        yield from (self._buy(claim.cheapest()) for claim in claims)

    def _is_batch_complete(self, uids: frozenset[str], now: float) -> bool:
        """True if pods are pending and the batch window has closed."""
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
    def _pods_on_draining(observation: Observation) -> list[core.Pod]:
        """Return pods on nodes being removed, which will need capacity elsewhere."""
        pods = observation.pods_by_node()
        names = [
            machine.node.metadata.name
            for machine in observation.machines()
            if machine.is_draining and machine.node is not None
        ]
        return [pod for name in names for pod in pods.get(name, [])]

    def _buy(self, offer: Offer) -> Buy:
        self._bought_count += 1
        return Buy(offer=offer, token=f"claim-{self._bought_count}")

    # ---- disruption

    def _consolidate(self, observation: Observation) -> Iterable[Action]:
        if self._replacing is not None:
            yield from self._finish_replacing(observation, *self._replacing)
            return
        if self._validating is not None:
            command, self._validating = self._validating, None
            if observation.now_seconds - command.found_at < VALIDATED_SECONDS:
                self._validating = command
            elif self._is_still_valid(command, observation):
                yield from self._execute(command)
            return
        # After a search without result, search again when the state or the nominations change.
        looked_at = (observation.version, frozenset(self._nominated(observation.now_seconds)))
        if looked_at != self._searched_state:
            self._validating = self._find_command(observation)
            self._searched_state = looked_at if self._validating is None else None

    def _find_command(self, observation: Observation) -> _Command | None:
        """Return the next command: delete empty nodes, replace several nodes, replace one."""
        candidates = self._candidates(observation)
        allowed_count = self._allowed_count(observation)
        if not candidates or not allowed_count or observation.pending():
            return None
        pods, now = observation.pods_by_node(), observation.now_seconds
        empty = [machine.token for machine in candidates if not _pods_of(machine, pods)]
        if empty:
            return _Command(tuple(empty[:allowed_count]), None, now)
        for count in range(min(allowed_count, len(candidates)), 1, -1):
            command = self._simulate(candidates[:count], observation)
            if command is not None:
                return command
        singles = (self._simulate([machine], observation) for machine in candidates[:CANDIDATES_COUNT_MAX])
        return next((command for command in singles if command is not None), None)

    def _candidates(self, observation: Observation) -> list[OwnedMachine]:
        """Return nodes that may be disrupted, by disruption cost."""
        pods, nominated = observation.pods_by_node(), self._nominated(observation.now_seconds)
        candidates = [
            machine
            for machine in observation.machines()
            if machine.is_usable
            and not machine.is_draining
            and not machine.has_notice
            and machine.token not in nominated
            and not any(is_protected(pod) or observation.is_blocked(pod) for pod in _pods_of(machine, pods))
        ]
        return sorted(
            candidates, key=lambda machine: (len(_pods_of(machine, pods)), machine.launched_seconds, machine.token)
        )

    def _nominated(self, now: float) -> set[str]:
        return {token for token, until in self._nominated_until.items() if until > now}

    @staticmethod
    def _allowed_count(observation: Observation) -> int:
        """Return a tenth of the initialized nodes, rounded up, less those not ready or being removed."""
        machines = observation.machines()
        initialized = sum(machine.is_usable for machine in machines)
        removed_count = sum(machine.is_draining or machine.has_notice for machine in machines)
        return max(0, -int(-initialized * BUDGET_RATIO // 1) - removed_count)

    def _simulate(self, draining: Sequence[OwnedMachine], observation: Observation) -> _Command | None:
        """Return the command that removes these nodes, if their pods fit elsewhere or on one cheaper node."""
        tokens = frozenset(machine.token for machine in draining)
        by_node = observation.pods_by_node()
        pods = [pod for machine in draining for pod in _pods_of(machine, by_node)]
        slots = observation.slots(without=tokens, include_booting=False)
        claim: _Claim | None = None
        for pod in sorted(pods, key=lambda pod: _by_size(observation.requests(pod)), reverse=True):
            requests = observation.requests(pod)
            slot = next((slot for slot in slots if slot.takes(pod, requests)), None)
            if slot is not None:
                slot.put(requests)
                continue
            if claim is None:
                claim = _Claim(self._cheaper_than(draining, observation), observation)
            if not claim.add(pod, requests):
                return None
        return _Command(tuple(sorted(tokens)), None if claim is None else claim.cheapest(), observation.now_seconds)

    @staticmethod
    def _cheaper_than(draining: Sequence[OwnedMachine], observation: Observation) -> list[Offer]:
        price = sum(machine.offer.price_micro_usd_per_hour or 0 for machine in draining)
        if all(machine.offer.capacity_type is CapacityType.SPOT for machine in draining):
            return []
        return [offer for offer in _buyable(observation) if (offer.price_micro_usd_per_hour or 0) < price]

    def _is_still_valid(self, command: _Command, observation: Observation) -> bool:
        candidates = {machine.token: machine for machine in self._candidates(observation)}
        draining = [candidates[token] for token in command.tokens if token in candidates]
        if (
            len(draining) < len(command.tokens)
            or self._allowed_count(observation) < len(draining)
            or observation.pending()
        ):
            return False
        simulated = self._simulate(draining, observation)
        return simulated is not None and simulated.replacement == command.replacement

    def _execute(self, command: _Command) -> Iterable[Action]:
        if command.replacement is None:
            yield from (Drain(token=token) for token in command.tokens)
            return
        bought = self._buy(command.replacement)
        self._replacing = (command, bought.token)
        yield bought

    def _finish_replacing(self, observation: Observation, command: _Command, token: str) -> Iterable[Action]:
        """Remove the old nodes once the replacement is ready; keep them if it does not arrive."""
        machines = {machine.token: machine for machine in observation.machines()}
        replacement = machines.get(token)
        if replacement is None or observation.now_seconds - replacement.launched_seconds > INITIALIZED_SECONDS_MAX:
            self._replacing = None
        elif replacement.is_usable:
            self._replacing = None
            self._nominated_until[token] = observation.now_seconds + NOMINATED_SECONDS
            yield from (Drain(token=old) for old in command.tokens if old in machines)


def _buyable(observation: Observation) -> list[Offer]:
    return [
        offer
        for offer in observation.offers
        if observation.now_seconds - observation.refused_at.get(offer.key, -REFUSED_SECONDS) >= REFUSED_SECONDS
    ]


def _pods_of(machine: OwnedMachine, pods: dict[str, list[core.Pod]]) -> list[core.Pod]:
    return [] if machine.node is None else pods.get(machine.node.metadata.name, [])


def _by_size(requests: Resources) -> tuple[int, int, int]:
    return requests.cpu_milli, requests.memory_bytes, requests.gpu_count
