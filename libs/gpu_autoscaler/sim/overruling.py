"""Operators who temporarily override the policy through the gateway; some lift the directive early."""

import contextlib
from collections.abc import Mapping
from datetime import timedelta

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.directives import AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.sim.faults import CLOUD, Faults
from gpu_autoscaler.sim.policies import Policies
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.timeline import VirtualLoop

KIND = "operator_overrules"
OVERRULED_SECONDS = (120.0, 2400.0)
TAKEN_BACK_RATIO = 0.3
AFTERWARDS_SECONDS = 600.0  # until deferred work is done and surplus nodes are removed


class Overrulers:
    """Everybody who may give directives."""

    def __init__(self, loop: VirtualLoop, record: Record, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._record = record
        self._policies = policies
        self._faults = faults
        self._said_count = 0
        self._given: dict[str, PolicyDirectiveGiven] = {}  # by key: directives that may be active

    def overrule(self) -> None:
        """Give a directive."""
        seconds = self._faults.seconds(KIND, *OVERRULED_SECONDS)
        pool = self._faults.choose(KIND, sorted(each.name for each in self._policies.now.pools))
        among: Mapping[str, AnyDirective] = {
            "freeze": Freeze(),
            "pause": PausePool(pool=pool),
            "least": Override(nodes_count_min=6),
            "least of a pool": Override(pool=pool, gpu_count_min=4),
            "most": Override(nodes_count_max=2),
            "most of a kind": Override(gpu_model="T4", gpu_count_max=2),
            "target": Override(nodes_count_min=3, nodes_count_max=3),
        }
        directive = among[self._faults.choose(KIND, sorted(among))]
        now = self._loop.now()
        until = now + timedelta(seconds=seconds)
        given = PolicyDirectiveGiven(directive=directive, reason="upkeep", given_by="ada", given_at=now, until=until)
        self._given[directive.key] = given
        self._faults.lasts(seconds + AFTERWARDS_SECONDS, CLOUD)
        self._say(given)
        if self._faults.seconds(KIND, 0.0, 1.0) < TAKEN_BACK_RATIO:
            self._loop.call_later(self._faults.seconds(KIND, 0.0, seconds), self._take_back, directive.key)

    def end(self) -> None:
        """Lift all directives that may be active."""
        for key in sorted(self._given):
            self._take_back(key)

    def _take_back(self, key: str) -> None:
        if key in self._given:
            del self._given[key]
            self._say(PolicyDirectiveLifted(key=key, lifted_by="bo", lifted_at=self._loop.now()))

    def _say(self, fact: Fact) -> None:
        self._said_count += 1
        name = FactId(derive_id("directive", self._said_count))
        with contextlib.suppress(TransientError):  # the gateway reports the error, and the operator does not retry
            self._record.publish(Envelope(id=name, source="/gateway", time=self._loop.now(), fact=fact))
