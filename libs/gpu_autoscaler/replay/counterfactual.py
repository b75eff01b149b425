"""What would have happened under another policy?

`rerun` simulates the recorded workload under a policy: the services given by `roles` run in the simulator's Kubernetes
and cloud, on virtual time. Recorded inputs are used as they were; the rest is modeled. `compare_policies` runs it under
the recorded policy and under another one. The recorded outcome is shown beside both, which reveals the model's error.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.model.format import counted, instant
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.replay.outcome import Outcome, measure
from gpu_autoscaler.replay.recording import Recording
from gpu_autoscaler.replay.workload_script import Reclaim, Refusal, Replicas, Script, script_of
from gpu_autoscaler.runtime.history import Stored
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.sim.adapters.assembly import AdapterFactory, Roles, tick_inputs_of_roles
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes, amounts_text
from gpu_autoscaler.sim.cluster.replica_sets import ReplicaSets
from gpu_autoscaler.sim.faults.injection import Faults
from gpu_autoscaler.sim.invariants.observer import Observer
from gpu_autoscaler.sim.process_pool import Process, ProcessPool
from gpu_autoscaler.sim.virtual_time import VirtualLoop

SEED = "replay"  # of random durations: start of a pod, end of a machine


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a script that was simulated under a policy."""

    facts: tuple[Stored, ...]  # in cluster time of the recording
    modeled: dict[str, int]  # what the recording could not answer -> number of answers of the model


class _RecordedCloud(Cloud):
    """A cloud that answers as recorded where the request matches the recording."""

    def __init__(self, workloads: Workloads, chance: random.Random, script: Script) -> None:
        super().__init__(workloads, chance, script.prices[0].offers if script.prices else ())
        self.modeled: Counter[str] = Counter()
        self._script = script
        self._boots = {name: deque(seconds) for name, seconds in script.boot_seconds.items()}

    def launch(
        self, order: Order, *, visible_in_seconds: float, comes_up: bool, shows_gpus: bool, was_delayed: bool = False
    ) -> Machine:
        """Launch, or refuse where the recording has a refusal in force."""
        if order.action_id not in self._by_token:
            for refusal in self._script.refusals:
                if refusal.from_at <= self._loop.now() < refusal.to_at and _applies_to(refusal, order.offer):
                    raise LaunchRefused(
                        f"{refusal.code}: refused until {refusal.to_at.isoformat()}, as recorded",
                        code=refusal.code,
                        scope=refusal.scope,
                        retry_after_seconds=(refusal.to_at - self._loop.now()).total_seconds(),
                    )
        return super().launch(
            order,
            visible_in_seconds=visible_in_seconds,
            comes_up=comes_up,
            shows_gpus=shows_gpus,
            was_delayed=was_delayed,
        )

    def boot_seconds(self, offer: Offer) -> float:
        """Return the next recorded boot time of the instance type."""
        boots = self._boots.get(offer.instance_type)
        if not boots:
            self.modeled["launches of an instance type without a recorded boot time: used the offer's"] += 1
            return offer.boot_seconds
        seconds = boots[0]
        boots.rotate(-1)  # more launches than recorded reuse the boot times from the first one
        return seconds

    def interrupt(self, reclaim: Reclaim) -> Machine | None:
        """Interrupt the oldest machine of the recorded kind; return None if there is none."""
        for machine in self.spot():
            if (machine.offer.instance_type, machine.offer.zone) == (reclaim.instance_type, reclaim.zone):
                self.warn(machine, reclaim.notice_seconds)
                return machine
        self.modeled["interruption notices without a matching machine: ignored"] += 1
        return None


def rerun(script: Script, policy: ScalingPolicy, roles: Roles) -> Rerun:
    """Simulate the script under the policy. Raises PermanentError if a service fails in the model."""
    return _Rerunner(script, policy, roles).run()


class _Rerunner:
    def __init__(self, script: Script, policy: ScalingPolicy, roles: Roles) -> None:
        self._script = script
        self._policy = policy
        self._roles = roles
        self._loop = VirtualLoop(script.from_at)
        self._faults = Faults(0, kinds=())
        self._faults.clock = self._loop.time
        self._bus = SimBus(self._loop)
        self._cluster = Kubernetes(self._loop.now)
        self._workloads = Workloads(self._cluster, self._loop, random.Random(f"{SEED}/workloads"))  # noqa: S311 - reproducible by its seed
        self._replica_sets = ReplicaSets(self._workloads)
        self._cloud = _RecordedCloud(self._workloads, random.Random(f"{SEED}/cloud"), script)  # noqa: S311 - reproducible by its seed
        identity = Cluster(installation=derive_id("installation", SEED), epoch=int(script.from_at.timestamp()))
        self._adapter_factory = AdapterFactory(identity, self._workloads, self._replica_sets, self._cloud, Observer())
        self._facts: list[Stored] = []
        self._failed: list[str] = []

    def run(self) -> Rerun:
        asyncio.set_event_loop(self._loop)
        self._bus.listen(lambda recorded: self._facts.append(Stored(at=self._loop.now(), recorded=recorded)))
        processes = ProcessPool(
            self._loop,
            self._faults,
            self._bus,
            tick_inputs_of_roles(self._roles, lambda: self._policy, skips_ticks=True),
            self._compose,
            lambda role, error: self._fails(f"{role}: {error!r}"),
        )
        try:
            self._stage()
            processes.begin()
            self._loop.call_later((self._script.to_at - self._script.from_at).total_seconds(), self._loop.stop)
            self._loop.run_forever()
        finally:
            processes.close()
            self._loop.end()
        if self._failed:
            raise PermanentError(f"the simulation failed: {self._failed[0]}; replay without --policy does not use it")
        return Rerun(facts=tuple(self._facts), modeled=dict(self._cloud.modeled))

    def _compose(self, process: Process) -> Service:
        refused = "the plan check refused a plan"
        bundle = self._adapter_factory.bundle(process, self._policy, on_refused_plan=lambda: self._fails(refused))
        return self._roles[process.role].compose(bundle)

    def _fails(self, what: str) -> None:
        self._failed.append(what)
        self._loop.stop()

    # ---- events of the script

    def _stage(self) -> None:
        script = self._script
        for documents in script.documents:
            self._at(documents.accepted_at, self._say, documents)
        for arrival in script.arrivals:
            self._at(arrival.at, self._say, arrival.request)
            if arrival.cancelled_at is not None and arrival.request.job_id is not None:
                self._at(arrival.cancelled_at, self._say, JobCancelRequested(job_id=arrival.request.job_id))
        for number, replicas in enumerate(script.replicas):
            self._at(replicas.from_at, self._serve, replicas, f"recorded-{number}")
        for prices in script.prices[1:]:
            self._at(prices.at, self._cloud.reprice, prices.offers)
        for reclaim in script.reclaims:
            self._at(reclaim.at, self._strike, reclaim)

    def _at(self, at: datetime, act: Callable[..., object], *more: object) -> None:
        left = at - self._script.from_at - timedelta(seconds=self._loop.time())
        self._loop.call_later(max(0.0, left.total_seconds()), act, *more)

    def _say(self, fact: Fact) -> None:
        fact_id = FactId(fact.condition() or derive_id(SEED, len(self._facts)))
        self._bus.publish(Envelope(id=fact_id, source="/replay", time=self._loop.now(), fact=fact))

    def _serve(self, replicas: Replicas, name: str) -> None:
        amounts = dict(amounts_text(replicas.requests.cpu_milli, replicas.requests.memory_bytes, 0))
        amounts[GPU_RESOURCE] = str(replicas.requests.gpu_count)
        container = core.Container(name="main", resources=core.ResourceList(requests=amounts, limits=amounts))
        uid = self._replica_sets.start(
            name,
            core.PodSpec(containers=(container,), termination_grace_period_seconds=replicas.grace_seconds),
            replicas_count=replicas.count,
            annotations=dict(replicas.annotations),
            healthy_count_min=max(0, replicas.count - 1),
        )
        if replicas.to_at is not None:
            self._at(replicas.to_at, self._replica_sets.stop, uid)

    def _strike(self, reclaim: Reclaim) -> None:
        machine = self._cloud.interrupt(reclaim)
        if machine is not None and reclaim.withdrawn_at is not None:
            self._at(reclaim.withdrawn_at, self._cloud.withdraw, machine)


def _applies_to(refusal: Refusal, offer: Offer) -> bool:
    match refusal.scope:
        case "region":
            return True
        case "zone":
            return refusal.offer.zone == offer.zone
        case _:
            return refusal.offer.key == offer.key


_Step = tuple[datetime, str]  # a decision, without names that differ between runs


class PolicyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes as recorded and under both policies."""

    from_at: Instant
    to_at: Instant
    recorded: Outcome
    modeled: Outcome  # under the recorded policy
    other: Outcome  # under the other policy
    diverged_at: Instant | None  # first different decision; None: none
    divergence: str  # the first different decision
    from_recording: tuple[str, ...]  # recorded inputs, as sentences
    assumptions: tuple[str, ...]  # what was modeled, as sentences


def compare_policies(recording: Recording, policy: ScalingPolicy, roles: Roles) -> PolicyComparison:
    """Compare this policy with the recorded one. Raises ConfigError if the recording has no offers."""
    script = script_of(recording)
    if not script.prices:
        raise ConfigError("history", ["it has no price list (spot.offers_sampled); record a longer interval"])
    same, other = (rerun(script, run_policy, roles) for run_policy in (recording.head.policy, policy))
    divergence = _first_divergence(same.facts, other.facts)
    return PolicyComparison(
        from_at=script.from_at,
        to_at=script.to_at,
        recorded=measure(recording.facts, script.from_at, script.to_at, recording.head.state),
        modeled=measure(same.facts, script.from_at, script.to_at),
        other=measure(other.facts, script.from_at, script.to_at),
        diverged_at=None if divergence is None else divergence[0],
        divergence="" if divergence is None else divergence[1],
        from_recording=tuple(_recorded_inputs(script)),
        assumptions=tuple(_assumptions(script, other)),
    )


def _first_divergence(same: Sequence[Stored], other: Sequence[Stored]) -> tuple[datetime, str] | None:
    steps, others = list(_steps(same)), list(_steps(other))
    number = next(
        (n for n, (a, b) in enumerate(zip(steps, others, strict=False)) if a != b), min(len(steps), len(others))
    )
    candidates = [
        (at, f"{owner} decides to {text}")
        for owner, decided in (("the recorded policy", steps), ("the other policy", others))
        for at, text in decided[number : number + 1]
    ]
    return min(candidates, default=None)


def _steps(facts: Sequence[Stored]) -> Iterator[_Step]:
    for stored in facts:
        fact = stored.recorded.fact
        if isinstance(fact, ScalingPlanMade):
            for decision in fact.plan.decisions:
                yield stored.at, _phrase(decision)


def _phrase(decision: AnyDecision) -> str:
    match decision:
        case BuyNode():
            return f"buy {decision.offer.key} for pool {decision.pool}"
        case DrainNode():
            return f"drain {decision.node_name} ({decision.reason.tag()})"
        case CancelDrain():
            return f"keep {decision.node_name} ({decision.reason.tag()})"
        case ReleaseInstance():
            return f"release an instance ({decision.reason.tag()})"


def _recorded_inputs(script: Script) -> Iterator[str]:
    boots = sum(len(seconds) for seconds in script.boot_seconds.values())
    yield f"{counted(len(script.arrivals), 'job')}: submission time, requests, run time"
    if script.replicas:
        yield f"{counted(len(script.replicas), 'group')} of other pods with GPUs: peak number of replicas"
    yield f"{counted(len(script.prices), 'price list')}; {counted(boots, 'boot time')} by instance type, as recorded"
    yield f"{counted(len(script.refusals), 'launch refusal')} of the cloud, each for its recorded duration"
    yield f"{counted(len(script.reclaims), 'interruption notice')} by instance type and zone"
    if script.documents:
        names = sorted({document.name for accepted in script.documents for document in accepted.documents})
        yield f"AutoscalingPolicy objects, merged under both policy files: {', '.join(names) or 'none'}"


def _assumptions(script: Script, other: Rerun) -> Iterator[str]:
    yield "Kubernetes, boots, drains and terminations are simulated; the simulation begins without nodes"
    if script.machines_before_count:
        yield f"{counted(script.machines_before_count, 'node')} ran at the start; the simulation buys its own instead"
    if script.under_way_count:
        yield (
            f"{counted(script.under_way_count, 'job')} were under way at the start; "
            "the simulation submits them then, with their remaining run time"
        )
    yield "offers without a recorded refusal are assumed available at their list price"
    if script.guessed_count:
        yield f"{counted(script.guessed_count, 'job')} never ran when recorded; assumed: the median run time"
    if script.never_up_count:
        yield f"{counted(script.never_up_count, 'node')} never became ready when recorded; in the simulation all do"
    if script.demanding_count:
        yield f"selectors and affinities of {counted(script.demanding_count, 'group')} of other pods are ignored"
    for description, count in sorted(other.modeled.items()):
        yield f"{count} x {description}"


def divergence_sentence(comparison: PolicyComparison) -> str:
    """Return a sentence on when the two policies first decide differently."""
    if comparison.diverged_at is None:
        return "both policies decide the same throughout"
    return f"the policies diverge at {instant(comparison.diverged_at)}: {comparison.divergence}"
