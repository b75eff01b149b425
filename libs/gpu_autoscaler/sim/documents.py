"""Policies kept as Kubernetes objects and published by the policy watcher. Some runs have two of them; people disable
one for a while, or change the labels of its nodes.

No change tightens a limit, so a plan made just before stays valid.
"""

import random
from collections.abc import Callable
from datetime import timedelta

from msgspec.structs import replace

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import FactId, derive_id
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.sim.faults import CLOUD, Faults
from gpu_autoscaler.sim.policies import EDITED, Policies, policy_of
from gpu_autoscaler.sim.record import Record
from gpu_autoscaler.sim.timeline import ORIGIN, VirtualLoop

KIND = "operator_edits_documents"
OFF_SECONDS = (300.0, 2400.0)
AFTERWARDS_SECONDS = 900.0  # until deferred purchases are made and usable
SAID_AGAIN_SECONDS = 2.0  # the policy watcher's tick interval
DOCUMENTED_RATIO = 0.12  # of runs

DOCUMENTED = (
    PolicyDocument(
        name="training",
        uid="uid-training",
        generation=1,
        created_at=ORIGIN,
        pools=(
            DocumentPool(name="cheap", priority=5, capacity_type=CapacityType.SPOT, nodes_count_max=8),
            DocumentPool(name="lasting", capacity_type=CapacityType.ON_DEMAND),
        ),
    ),
    PolicyDocument(
        name="inference",
        uid="uid-inference",
        generation=1,
        created_at=ORIGIN + timedelta(seconds=1),
        pools=(DocumentPool(name="small", gpu_models=("T4",), nodes_count_min=1, labels={"tier": "inference"}),),
    ),
)


def documents_of(seed: int) -> tuple[PolicyDocument, ...]:
    """Return the policy objects at the start of the run. The string that seeds `Random` is part of each seed's meaning."""
    return DOCUMENTED if random.Random(f"{seed}/documents").random() < DOCUMENTED_RATIO else ()


def policies_of(seed: int, when_changed: Callable[[], None]) -> Policies:
    """Return the policies of a run, with its documents merged; `when_changed` as in `Policies`."""
    return Policies(policy_of(seed), documents_of(seed), when_changed=when_changed)


class Documents:
    """Operators of policy objects, and the policy watcher."""

    def __init__(self, loop: VirtualLoop, record: Record, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._record = record
        self._policies = policies
        self._faults = faults
        self._said_count = 0
        self._is_lost = False

    def lost(self) -> None:
        """The stream with the published documents is lost."""
        self._is_lost = bool(self._policies.documents)

    def say_what_is_lost(self) -> None:
        """The broker is back: publish again if the documents were lost."""
        if self._is_lost:
            self.say()

    def say(self) -> None:
        """Publish the accepted documents; retry until the broker has stored them."""
        documents = self._policies.documents
        if not documents:
            return
        self._said_count += 1
        fact = PolicyDocumentsAccepted(documents=documents, accepted_at=self._loop.now())
        name = FactId(derive_id("documents", self._said_count))
        try:
            self._record.publish(Envelope(id=name, source="/policy_watcher", time=self._loop.now(), fact=fact))
            self._is_lost = False
        except TransientError:
            self._loop.call_later(SAID_AGAIN_SECONDS, self.say)

    def edit(self) -> None:
        """Disable a policy for a while, or change the labels of its nodes."""
        one = self._faults.choose(KIND, sorted(each.name for each in self._policies.documents))
        if self._faults.seconds(KIND, 0.0, 1.0) < 0.5:
            seconds = self._faults.seconds(KIND, *OFF_SECONDS)
            self._faults.lasts(seconds + AFTERWARDS_SECONDS, CLOUD)
            self._change(one, is_enabled=False)
            self._loop.call_later(seconds, self._switch_on, one)
        else:
            (document,) = (each for each in self._policies.documents if each.name == one)
            pools = [replace(pool, labels={**pool.labels, EDITED: str(document.generation)}) for pool in document.pools]
            self._change(one, pools=tuple(pools))

    def end(self) -> None:
        """Enable all policies."""
        for each in self._policies.documents:
            self._switch_on(each.name)

    def _switch_on(self, name: str) -> None:
        if any(each.name == name and not each.is_enabled for each in self._policies.documents):
            self._change(name, is_enabled=True)

    def _change(self, name: str, **changes: object) -> None:
        self._policies.keep(
            tuple(
                replace(each, generation=each.generation + 1, **changes) if each.name == name else each
                for each in self._policies.documents
            )
        )
        self.say()
