"""State and connections shared by the handlers, under one key of the app."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from gpu_autoscaler.bus.protocol import Ack, Bus
from gpu_autoscaler.core.explain.status import StatusView
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.publisher import Publisher
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway.access import Access
from gpu_autoscaler_services.gateway.audit import AuditTrail, act_of
from gpu_autoscaler_services.gateway.cost_history import CostHistory
from gpu_autoscaler_services.gateway.estimates import Scene
from gpu_autoscaler_services.gateway.recent_facts import Tail
from gpu_autoscaler_services.gateway.subjects import SubjectFilter

PLANS = SubjectFilter([ScalingPlanMade.subject_root()])
# Wall time. A hundred requests at once share the estimates of the queue: those for each would take half a minute.
SCENE_SECONDS_MAX = 1.0
PUBLISH_SECONDS_MAX = 10.0  # wall time; clients and proxies give up after 30 s


@dataclass(kw_only=True)
class ReadModel:
    """Collaborators of the handlers, created by the wiring."""

    view: StateView
    tail: Tail
    cost_history: CostHistory
    store: Store
    bus: Bus
    publisher: Publisher
    policy_file: ScalingPolicy
    clock: Clock
    settings: Settings = field(default_factory=Settings)  # of this process
    are_pod_templates_allowed: bool = True  # to callers
    are_dangerous_fields_allowed: bool = False  # of pod templates, to callers
    are_env_values_shown: bool = False  # in events of jobs
    audit: AuditTrail = field(init=False)
    _scene: tuple[Scene | None, float] = field(init=False, default=(None, 0.0))
    # An explanation reads whole streams: one at a time, so that other requests are not delayed.
    explanation_turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    cost_turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # reads up to 100,000 rows

    def __post_init__(self) -> None:
        self.audit = AuditTrail(self.store, self.clock)

    def use_policy(self, policy: ScalingPolicy) -> None:
        self.policy_file = policy

    @property
    def policy(self) -> ScalingPolicy:
        """Return the effective policy: the file, merged with the AutoscalingPolicy objects."""
        return effective_policy(self.policy_file, self.view.state.policy_documents)

    def status_view(self) -> StatusView:
        """Return the status view of the state and the latest published plan."""
        latest = [entry.recorded.fact for entry in self.tail.recent(PLANS, 1)]
        plans = [fact.plan for fact in latest if isinstance(fact, ScalingPlanMade)]
        return StatusView.of(self.view.state, self.policy, self.clock.now(), plans[0] if plans else None)

    def scene_of_new_jobs(self) -> Scene:
        """Return what the answers to submitted jobs are estimated from; requests at the same time share it."""
        state, policy, at_seconds = self.view.state, self.policy, Clock.monotonic_seconds()
        scene, made_at_seconds = self._scene
        now = self.clock.now()
        is_young = at_seconds - made_at_seconds <= SCENE_SECONDS_MAX
        shared = scene.of_state(state, policy, now) if scene is not None and is_young else None
        made = shared or Scene.of(state, policy, now)
        self._scene = made, at_seconds if shared is None else made_at_seconds
        return made

    async def publish(self, fact: Fact, access: Access, project_id: str | None = None) -> Ack:
        """Record the caller's act, publish its fact, and wait for the acknowledgment. Raises TransientError after a
        time-out; the fact may be stored in spite of it, so clients retry with an Idempotency-Key.

        `project_id`: of the object, if the fact does not have it.
        """
        unreachable = "the broker does not answer; retry with the same Idempotency-Key, so that the request counts once"
        if not self.bus.is_connected:
            raise TransientError(unreachable)
        (prepared,) = self.publisher.prepare((fact,))
        act = act_of(fact)
        assert act is not None, f"{fact.type_name()} is no act of a caller"  # noqa: S101 - a bug of ours
        act = act if project_id is None else msgspec.structs.replace(act, project_id=project_id)
        await self.audit.allowed(access, act, prepared.message_id)
        try:
            async with asyncio.timeout(PUBLISH_SECONDS_MAX):
                (ack,) = await self.publisher.send((prepared,))
        except TimeoutError as error:
            raise TransientError(unreachable) from error
        return ack


READ_MODEL: web.AppKey[ReadModel] = web.AppKey("read_model", ReadModel)

# Sent with every response: browsers load content from this gateway only (CSP Level 3).
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
