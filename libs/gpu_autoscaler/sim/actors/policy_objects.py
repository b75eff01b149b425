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
from gpu_autoscaler.sim.actors.policies import EDITED, Policies, policy_of
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.faults.injection import CLOUD, Faults
from gpu_autoscaler.sim.virtual_time import ORIGIN, VirtualLoop

EDITS_POLICY_OBJECTS = "operator_edits_documents"
OFF_SECONDS = (300.0, 2400.0)
AFTERWARDS_SECONDS = 900.0  # until deferred purchases are made and usable
RETRY_SECONDS = 2.0  # the policy watcher's tick interval
POLICY_OBJECTS_RATIO = 0.12  # of runs

POLICY_OBJECTS = (
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
    """Return the initial policy objects. The string that seeds `Random` is part of each seed's meaning."""
    return POLICY_OBJECTS if random.Random(f"{seed}/documents").random() < POLICY_OBJECTS_RATIO else ()


def policies_of(seed: int, when_changed: Callable[[], None]) -> Policies:
    """Return the policies of a run, with its documents merged; `when_changed` as in `Policies`."""
    return Policies(policy_of(seed), documents_of(seed), when_changed=when_changed)


class PolicyObjects:
    """Operators of policy objects, and the policy watcher."""

    def __init__(self, loop: VirtualLoop, bus: SimBus, policies: Policies, faults: Faults) -> None:
        self._loop = loop
        self._bus = bus
        self._policies = policies
        self._faults = faults
        self._published_count = 0
        self._is_lost = False

    def streams_lost(self) -> None:
        """The stream with the published documents is lost."""
        self._is_lost = bool(self._policies.documents)

    def publish_if_lost(self) -> None:
        """The broker is back: publish again if the documents were lost."""
        if self._is_lost:
            self.publish()

    def publish(self) -> None:
        """Publish the accepted documents; retry until the broker has stored them."""
        documents = self._policies.documents
        if not documents:
            return
        self._published_count += 1
        fact = PolicyDocumentsAccepted(documents=documents, accepted_at=self._loop.now())
        name = FactId(derive_id("documents", self._published_count))
        try:
            self._bus.publish(Envelope(id=name, source="/policy_watcher", time=self._loop.now(), fact=fact))
            self._is_lost = False
        except TransientError:
            self._loop.call_later(RETRY_SECONDS, self.publish)

    def edit(self) -> None:
        """Disable a policy for a while, or change the labels of its nodes."""
        name = self._faults.choose(EDITS_POLICY_OBJECTS, sorted(document.name for document in self._policies.documents))
        if self._faults.seconds(EDITS_POLICY_OBJECTS, 0.0, 1.0) < 0.5:
            seconds = self._faults.seconds(EDITS_POLICY_OBJECTS, *OFF_SECONDS)
            self._faults.disturb(seconds + AFTERWARDS_SECONDS, CLOUD)
            self._change(name, is_enabled=False)
            self._loop.call_later(seconds, self._enable, name)
        else:
            (document,) = (document for document in self._policies.documents if document.name == name)
            pools = [replace(pool, labels={**pool.labels, EDITED: str(document.generation)}) for pool in document.pools]
            self._change(name, pools=tuple(pools))

    def end(self) -> None:
        """Enable all policies."""
        for document in self._policies.documents:
            self._enable(document.name)

    def _enable(self, name: str) -> None:
        if any(document.name == name and not document.is_enabled for document in self._policies.documents):
            self._change(name, is_enabled=True)

    def _change(self, name: str, **changes: object) -> None:
        self._policies.keep(
            tuple(
                replace(document, generation=document.generation + 1, **changes) if document.name == name else document
                for document in self._policies.documents
            )
        )
        self.publish()
