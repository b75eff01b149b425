"""What handlers share: everything that the gateway knows and the doors it may use, under one key of the app."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from gpu_autoscaler.bus.protocol import Ack, Bus
from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.headline import Sight
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway.ledger import Ledger
from gpu_autoscaler_services.gateway.subjects import SubjectFilter
from gpu_autoscaler_services.gateway.tail import Tail

PLANS = SubjectFilter([ScalingPlanMade.subject_root()])
PUBLISH_SECONDS_MAX = 10.0  # wall time; clients and proxies give up after 30 s


@dataclass(kw_only=True)
class ReadModel:
    """The gateway's collaborators; made by the wiring, read by the handlers."""

    view: StateView
    tail: Tail
    ledger: Ledger
    store: Store
    bus: Bus
    publisher: Publisher
    policy_file: ScalingPolicy
    clock: Clock
    # A story reads whole streams: one at a time, so that curiosity never starves the screens.
    one_story_at_a_time: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Answer by this policy file from now on."""
        self.policy_file = policy

    @property
    def policy(self) -> ScalingPolicy:
        """What is in force: the file, with the documents that are merged under it."""
        return effective_policy(self.policy_file, self.view.state.policy_documents)

    def sight(self) -> Sight:
        """What lines about waiting work are read from: the state, and the last plan that came over the stream."""
        newest = [entry.recorded.fact for entry in self.tail.recent(PLANS, 1)]
        plans = [fact.plan for fact in newest if isinstance(fact, ScalingPlanMade)]
        return Sight.of(self.view.state, self.policy, self.clock.now(), plans[0] if plans else None)

    async def publish(self, fact: Fact) -> Ack:
        """Store a fact on the stream; returns when it is there. Raises TransientError soon: somebody waits for us.

        What timed out may be stored all the same. That is why requests repeat under an Idempotency-Key.
        """
        away = "the broker does not answer; repeat the request, with an Idempotency-Key so that it counts once"
        if not self.bus.is_connected:
            raise TransientError(away)
        try:
            async with asyncio.timeout(PUBLISH_SECONDS_MAX):
                (ack,) = await self.publisher.publish((fact,))
        except TimeoutError as error:
            raise TransientError(away) from error
        return ack


READ_MODEL: web.AppKey[ReadModel] = web.AppKey("read_model", ReadModel)

# Kept here because every answer carries it: browsers are told to trust nothing but this gateway (CSP Level 3).
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
