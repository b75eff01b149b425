"""Plays the world of a recorded history again under a policy: the real services, put together from `roles`, in the
simulator's Kubernetes and cloud, on virtual time. What the record knows is taken over; the rest is modelled.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import Cluster
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.crew import Crew
from gpu_autoscaler.sim.faults import Faults
from gpu_autoscaler.sim.groups import Groups
from gpu_autoscaler.sim.kubernetes import Kubernetes, amounts_text
from gpu_autoscaler.sim.outside import Outside, glances_of
from gpu_autoscaler.sim.process import Process
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.seat import Roles
from gpu_autoscaler.sim.timeline import VirtualLoop
from gpu_autoscaler.sim.workloads import Workloads
from gpu_autoscaler.tools.history import Stored
from gpu_autoscaler.tools.script import Reclaim, Refusal, Replicas, Script

SEED = "replay"  # of what happens by chance: how long a pod takes to start, a machine to end


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a script under a policy."""

    facts: tuple[Stored, ...]  # at the instants of the record
    modelled: dict[str, int]  # how often the model answered where the record could not, by what was asked


class _RecordedCloud(Cloud):
    """A cloud that answers as it did in the record, where it was asked the same."""

    def __init__(self, workloads: Workloads, chance: random.Random, script: Script) -> None:
        super().__init__(workloads, chance, script.prices[0].offers if script.prices else ())
        self.modelled: Counter[str] = Counter()
        self._script = script
        self._boots = {name: deque(seconds) for name, seconds in script.boot_seconds.items()}

    def launch(
        self, order: Order, *, visible_in_seconds: float, comes_up: bool, shows_gpus: bool, was_held: bool = False
    ) -> Machine:
        """As the record says: refused while it was."""
        if order.action_id not in self._by_token:
            for refusal in self._script.refusals:
                if refusal.from_at <= self._loop.now() < refusal.to_at and _reaches(refusal, order.offer):
                    raise LaunchRefused(
                        f"{refusal.code}: refused until {refusal.to_at.isoformat()}, as in the record",
                        code=refusal.code,
                        scope=refusal.scope,
                        retry_after_seconds=(refusal.to_at - self._loop.now()).total_seconds(),
                    )
        return super().launch(
            order,
            visible_in_seconds=visible_in_seconds,
            comes_up=comes_up,
            shows_gpus=shows_gpus,
            was_held=was_held,
        )

    def boot_seconds(self, offer: Offer) -> float:
        """Usable after the boot times of its type, in their order."""
        known = self._boots.get(offer.instance_type)
        if not known:
            self.modelled["launches of a type that was never launched: booted as long as the offer says"] += 1
            return offer.boot_seconds
        seconds = known[0]
        known.rotate(-1)  # more launches than in the record begin again with its first boot
        return seconds

    def strike(self, reclaim: Reclaim) -> Machine | None:
        """Give notice to the oldest machine of the recorded kind; None where there is none."""
        for machine in self.spot():
            if (machine.offer.instance_type, machine.offer.zone) == (reclaim.instance_type, reclaim.zone):
                self.warn(machine, reclaim.notice_seconds)
                return machine
        self.modelled["notices for a kind of machine that was not there: struck nobody"] += 1
        return None


def rerun(script: Script, policy: ScalingPolicy, roles: Roles) -> Rerun:
    """Return what the services make of the script. Raises PermanentError where they fail in the model."""
    return _Play(script, policy, roles).play()


class _Play:
    def __init__(self, script: Script, policy: ScalingPolicy, roles: Roles) -> None:
        self._script = script
        self._policy = policy
        self._roles = roles
        self._loop = VirtualLoop(script.from_at)
        self._faults = Faults(0, kinds=())
        self._faults.clock = self._loop.time
        self._record = Record(self._loop)
        self._cluster = Kubernetes(self._loop.now)
        self._workloads = Workloads(self._cluster, self._loop, random.Random(f"{SEED}/workloads"))  # noqa: S311 - chance that comes again with its seed
        self._groups = Groups(self._workloads)
        self._cloud = _RecordedCloud(self._workloads, random.Random(f"{SEED}/cloud"), script)  # noqa: S311 - as above
        identity = Cluster(installation=derive_id("installation", SEED), epoch=int(script.from_at.timestamp()))
        self._outside = Outside(identity, self._workloads, self._groups, self._cloud, _Nobody())
        self._facts: list[Stored] = []
        self._failed: list[str] = []

    def play(self) -> Rerun:
        asyncio.set_event_loop(self._loop)
        self._record.listen(self._keep)
        crew = Crew(
            self._loop,
            self._faults,
            self._record,
            glances_of(self._roles, lambda: self._policy, skips_ticks=True),
            self._compose,
            lambda role, error: self._fails(f"{role}: {error!r}"),
        )
        try:
            self._stage()
            crew.begin()
            self._loop.call_later((self._script.to_at - self._script.from_at).total_seconds(), self._loop.stop)
            self._loop.run_forever()
        finally:
            crew.close()
            self._close()
        if self._failed:
            raise PermanentError(f"the model stopped: {self._failed[0]}; replay without --policy still works")
        return Rerun(facts=tuple(self._facts), modelled=dict(self._cloud.modelled))

    def _compose(self, process: Process) -> Service:
        refused = "a plan was refused by the second opinion"
        seat = self._outside.seat(process, self._policy, on_refused_plan=lambda: self._fails(refused))
        return self._roles[process.role].compose(seat)

    def _fails(self, what: str) -> None:
        self._failed.append(what)
        self._loop.stop()

    def _keep(self, recorded: Recorded) -> None:
        self._facts.append(Stored(at=self._loop.now(), recorded=recorded))

    def _close(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)
        self._loop.call_later(0.0, self._loop.stop)
        self._loop.run_forever()
        self._loop.close()
        asyncio.set_event_loop(None)

    # ---- what happens

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
        self._record.publish(Envelope(id=fact_id, source="/replay", time=self._loop.now(), fact=fact))

    def _serve(self, replicas: Replicas, name: str) -> None:
        amounts = dict(amounts_text(replicas.requests.cpu_milli, replicas.requests.memory_bytes, 0))
        amounts[GPU_RESOURCE] = str(replicas.requests.gpu_count)
        container = wire.Container(name="main", resources=wire.ResourceList(requests=amounts, limits=amounts))
        uid = self._groups.start(
            name,
            wire.PodSpec(containers=(container,), termination_grace_period_seconds=replicas.grace_seconds),
            replicas_count=replicas.count,
            annotations=dict(replicas.annotations),
            healthy_count_min=max(0, replicas.count - 1),
        )
        if replicas.to_at is not None:
            self._at(replicas.to_at, self._groups.stop, uid)

    def _strike(self, reclaim: Reclaim) -> None:
        machine = self._cloud.strike(reclaim)
        if machine is not None and reclaim.withdrawn_at is not None:
            self._at(reclaim.withdrawn_at, self._cloud.withdraw, machine)


class _Nobody:
    """Looks on without a word: promises are the simulator's affair."""

    def asked(self, order: Order, known_to: int) -> None:
        """Somebody is about to ask for a machine."""

    def disturbed(self, pod: wire.Pod, *, is_forced: bool) -> None:
        """Somebody asks for the pod's eviction."""

    def ended(self, machine: Machine) -> None:
        """Somebody ends a machine."""

    def removed(self, node: wire.Node) -> None:
        """Somebody deletes a node."""


def _reaches(refusal: Refusal, offer: Offer) -> bool:
    match refusal.scope:
        case "region":
            return True
        case "zone":
            return refusal.offer.zone == offer.zone
        case _:
            return refusal.offer.key == offer.key
