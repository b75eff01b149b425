"""Zonal volumes: storage classes, claims with immediate or delayed binding, and claims created late.

Most runs have none. Reachability is computed independently of the core, whose zone rules are thereby tested.
"""

import random
from functools import partial

from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import CLAIMS, CLASSES, PODS, VOLUMES
from gpu_autoscaler.kube.wire import core, storage
from gpu_autoscaler.model import labels
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry
from gpu_autoscaler.simcluster.offers import ZONES

NAMESPACE = "serving"
VOLUMES_RATIO = 0.2  # of runs: services keep data
DELAYED, IMMEDIATE = "waits-for-pod", "at-once"
CLAIMED_RATIO = 0.6  # of services in such a run
LATE_RATIO = 0.3  # of claims: created after the pods that name them
LATE_SECONDS = (60.0, 900.0)
PROVISIONED_SECONDS = (1.0, 30.0)


def has_volumes(seed: int) -> bool:
    """True for a run whose services keep data. The string that seeds `Random` is part of the seed's meaning."""
    return random.Random(f"{seed}/claimed volumes").random() < VOLUMES_RATIO


class VolumeController:
    """The volumes of one cluster and their controller."""

    def __init__(self, workloads: Workloads, rng: random.Random) -> None:
        self._workloads = workloads
        self._cluster = workloads.cluster
        self._rng = rng
        self._cluster.serve(CLAIMS, VOLUMES, CLASSES)
        workloads.reaches = self.reaches
        for name in (DELAYED, IMMEDIATE):
            storage_class = storage.StorageClass(
                metadata=self._cluster.metadata("", name),
                provisioner="csi.example",
                volume_binding_mode="WaitForFirstConsumer" if name == DELAYED else "Immediate",
            )
            self._cluster.put(CLASSES, storage_class)
        self._cluster.listen(self._on_change)

    def volumes_for(self, service: str) -> tuple[core.Volume, ...]:
        """Return the service's volumes, and create their claims now or late; some services get none."""
        rng = self._rng
        if rng.random() >= CLAIMED_RATIO:
            return ()
        name, class_name = f"{service}-data", rng.choice((DELAYED, DELAYED, IMMEDIATE))
        if rng.random() < LATE_RATIO:
            self._workloads.loop.call_later(rng.uniform(*LATE_SECONDS), self._claim, name, class_name)
        else:
            self._claim(name, class_name)
        return (core.Volume(name="data", persistent_volume_claim=core.ClaimSource(claim_name=name)),)

    def reaches(self, pod: core.Pod, node: core.Node) -> bool:
        for volume in pod.spec.volumes:
            source = volume.persistent_volume_claim
            claim = None if source is None else self._cluster.find(CLAIMS, NAMESPACE, source.claim_name)
            if source is not None and claim is None:
                return False
            if claim is None:
                continue
            if not claim.spec.volume_name:
                if claim.spec.storage_class_name == IMMEDIATE:
                    return False
            elif self._zone_of(claim) != node.metadata.labels.get(labels.ZONE):
                return False
        return True

    def _claim(self, name: str, class_name: str) -> None:
        spec = core.ClaimSpec(storage_class_name=class_name)
        self._cluster.put(CLAIMS, storage.Claim(metadata=self._cluster.metadata(NAMESPACE, name), spec=spec))
        if class_name == IMMEDIATE:
            make = partial(self._make, name, self._rng.choice(ZONES))
            self._workloads.loop.call_later(self._rng.uniform(*PROVISIONED_SECONDS), make)
        self._workloads.request_scheduling()

    def _make(self, name: str, zone: str) -> None:
        claim = self._cluster.find(CLAIMS, NAMESPACE, name)
        if claim is None or claim.spec.volume_name:
            return
        in_zone = core.Requirement(key=labels.ZONE, operator="In", values=(zone,))
        selector = core.NodeSelector(node_selector_terms=(core.SelectorTerm(match_expressions=(in_zone,)),))
        volume = storage.PersistentVolume(
            metadata=self._cluster.metadata("", f"volume-{name}"),
            spec=storage.VolumeSpec(node_affinity=storage.VolumeNodeAffinity(required=selector)),
            status=storage.VolumeStatus(phase="Bound"),
        )
        self._cluster.put(VOLUMES, volume)
        bound = replace(claim.spec, volume_name=volume.metadata.name)
        self._cluster.put(CLAIMS, replace(claim, spec=bound, status=storage.ClaimStatus(phase="Bound")))
        self._workloads.request_scheduling()

    def _zone_of(self, claim: storage.Claim) -> str:
        volume = self._cluster.find(VOLUMES, "", claim.spec.volume_name)
        affinity = None if volume is None else volume.spec.node_affinity
        required = None if affinity is None else affinity.required
        return "" if required is None else required.node_selector_terms[0].match_expressions[0].values[0]

    def _on_change(self, plural: str, entry: Entry) -> None:
        """A bound pod gets its volumes in its node's zone."""
        pod = entry.object
        if plural != PODS.plural or entry.is_deleted or not isinstance(pod, core.Pod) or not pod.spec.node_name:
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
