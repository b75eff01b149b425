"""Zonal volumes: storage classes, claims with immediate or delayed binding, and claims created late.

Most runs have none. Reachability is computed independently of the core, whose zone rules are thereby tested.
"""

import random
from functools import partial

from msgspec.structs import replace

from gpu_autoscaler.kube import wire, wire_storage
from gpu_autoscaler.kube.protocol import CLAIMS, CLASSES, PODS, VOLUMES
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.kubernetes import Entry
from gpu_autoscaler.sim.workloads import Workloads
from gpu_autoscaler.simcluster.offers import ZONES

NAMESPACE = "serving"
RATIO = 0.2  # of runs: services keep data
WAITS, AT_ONCE = "waits-for-pod", "at-once"
CLAIMED_RATIO = 0.6  # of services in such a run
LATE_RATIO = 0.3  # of claims: created after the pods that name them
LATE_SECONDS = (60.0, 900.0)
MADE_SECONDS = (1.0, 30.0)


def has_storage(seed: int) -> bool:
    """True for a run whose services keep data. The string that seeds `Random` is part of the seed's meaning."""
    return random.Random(f"{seed}/claimed volumes").random() < RATIO


class Storage:
    """The volumes of one cluster and their controller."""

    def __init__(self, workloads: Workloads, chance: random.Random) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._chance = chance
        self._cluster.serve(CLAIMS, VOLUMES, CLASSES)
        workloads.reaches = self.reaches
        for name in (WAITS, AT_ONCE):
            made = wire_storage.StorageClass(
                metadata=self._cluster.metadata("", name),
                provisioner="csi.example",
                volume_binding_mode="WaitForFirstConsumer" if name == WAITS else "Immediate",
            )
            self._cluster.put(CLASSES, made)
        self._cluster.listen(self._heard)

    def volumes_for(self, service: str) -> tuple[wire.Volume, ...]:
        """Return the service's volumes, and create their claims now or late; some services get none."""
        chance = self._chance
        if chance.random() >= CLAIMED_RATIO:
            return ()
        name, called = f"{service}-data", chance.choice((WAITS, WAITS, AT_ONCE))
        if chance.random() < LATE_RATIO:
            self._workloads.loop.call_later(chance.uniform(*LATE_SECONDS), self._claim, name, called)
        else:
            self._claim(name, called)
        return (wire.Volume(name="data", persistent_volume_claim=wire.ClaimSource(claim_name=name)),)

    def reaches(self, pod: wire.Pod, node: wire.Node) -> bool:
        """True if all volumes of the pod are reachable from the node."""
        for volume in pod.spec.volumes:
            source = volume.persistent_volume_claim
            claim = None if source is None else self._cluster.find(CLAIMS, NAMESPACE, source.claim_name)
            if source is not None and claim is None:
                return False
            if claim is None:
                continue
            if not claim.spec.volume_name:
                if claim.spec.storage_class_name == AT_ONCE:
                    return False
            elif self._zone_of(claim) != node.metadata.labels.get(labels.ZONE):
                return False
        return True

    def _claim(self, name: str, called: str) -> None:
        spec = wire_storage.ClaimSpec(storage_class_name=called)
        self._cluster.put(CLAIMS, wire_storage.Claim(metadata=self._cluster.metadata(NAMESPACE, name), spec=spec))
        if called == AT_ONCE:
            make = partial(self._make, name, self._chance.choice(ZONES))
            self._workloads.loop.call_later(self._chance.uniform(*MADE_SECONDS), make)
        self._workloads.look_again()

    def _make(self, name: str, zone: str) -> None:
        """Create the volume and bind the claim to it."""
        claim = self._cluster.find(CLAIMS, NAMESPACE, name)
        if claim is None or claim.spec.volume_name:
            return
        here = wire.Requirement(key=labels.ZONE, operator="In", values=(zone,))
        reached = wire.NodeSelector(node_selector_terms=(wire.SelectorTerm(match_expressions=(here,)),))
        volume = wire_storage.PersistentVolume(
            metadata=self._cluster.metadata("", f"volume-{name}"),
            spec=wire_storage.VolumeSpec(node_affinity=wire_storage.VolumeNodeAffinity(required=reached)),
            status=wire_storage.VolumeStatus(phase="Bound"),
        )
        self._cluster.put(VOLUMES, volume)
        bound = replace(claim.spec, volume_name=volume.metadata.name)
        self._cluster.put(CLAIMS, replace(claim, spec=bound, status=wire_storage.ClaimStatus(phase="Bound")))
        self._workloads.look_again()

    def _zone_of(self, claim: wire_storage.Claim) -> str:
        volume = self._cluster.find(VOLUMES, "", claim.spec.volume_name)
        affinity = None if volume is None else volume.spec.node_affinity
        required = None if affinity is None else affinity.required
        return "" if required is None else required.node_selector_terms[0].match_expressions[0].values[0]

    def _heard(self, plural: str, entry: Entry) -> None:
        """A bound pod gets its volumes in its node's zone."""
        pod = entry.object
        if plural != PODS.plural or entry.is_deleted or not isinstance(pod, wire.Pod) or not pod.spec.node_name:
            return
        zone = next(
            (
                node.metadata.labels.get(labels.ZONE, "")
                for node in self._workloads.nodes()
                if node.metadata.name == pod.spec.node_name
            ),
            "",
        )
        for volume in pod.spec.volumes:
            if volume.persistent_volume_claim is not None and zone:
                self._make(volume.persistent_volume_claim.claim_name, zone)
