"""Translates objects related to a pod: the nodes that reach its volumes, its devices, its pod group, its
PodDisruptionBudgets and ResourceQuotas.

Source: Kubernetes documentation, "Persistent Volumes", "Storage Classes" (volume binding mode, allowed topologies),
read 2026-11-21.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpu_autoscaler.events.pod import PodBudgetGone, PodBudgetObserved, PodQuotaGone, PodQuotaObserved
from gpu_autoscaler.kube.translate.common import requirements
from gpu_autoscaler.kube.translate.devices import NOTHING_CLAIMED, Claimed, Claims, claimed
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.kube.wire import storage as wire_storage
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.resources import parse_quantity_milli
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm, Terms

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
NO_PROVISIONER = "kubernetes.io/no-provisioner"  # only existing, manually created volumes
# Drivers use their own keys for the zone, which nodes have only once the driver runs there (documentation of the CSI
# drivers for EBS, Persistent Disk and Azure Disk, "topology"; read 2026-11-21). The value is that of the zone label.
_ZONE_KEYS = frozenset(
    {
        "failure-domain.beta.kubernetes.io/zone",
        "topology.ebs.csi.aws.com/zone",
        "topology.gke.io/zone",
        "topology.disk.csi.azure.com/zone",
    }
)
Key = tuple[str, str]  # namespace and name


class Storage(msgspec.Struct, kw_only=True):
    """The last observed claims, volumes and storage classes."""

    claims: dict[Key, wire_storage.Claim] = {}
    volumes: dict[str, wire_storage.PersistentVolume] = {}
    classes: dict[str, wire_storage.StorageClass] = {}
    # By class: the nodes that reach its available volumes, None without one. Whoever changes a volume removes the entry
    # of its class: pods with unbound claims of one class share one search through the volumes.
    available: dict[str, Terms | None] = {}

    def class_of(self, claim: wire_storage.Claim) -> str:
        """Return the claim's storage class, or the default one; empty: none."""
        if claim.spec.storage_class_name is not None:
            return claim.spec.storage_class_name
        return next((name for name, storage_class in self.classes.items() if _is_default(storage_class)), "")

    def reach_available(self, class_name: str) -> Terms | None:
        """Return the nodes that reach an available volume of the class; None without such a volume."""
        if class_name not in self.available:
            names = [
                name
                for name, volume in self.volumes.items()
                if volume.spec.storage_class_name == class_name and volume.status.phase == "Available"
            ]
            reached = [_nodes(self.volumes[name]) for name in sorted(names)]
            terms = () if not all(reached) else tuple(dict.fromkeys(term for terms in reached for term in terms))
            self.available[class_name] = terms if reached else None
        return self.available[class_name]


class RelatedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The demands of other objects on a pod's node."""

    alternatives: tuple[Terms, ...] = ()  # of each volume that only some nodes can reach
    problem: str = ""  # why no node can help; empty: a node can
    devices: Claimed = NOTHING_CLAIMED
    group_count_min: int | None = None  # None: unknown
    version: int = 0  # the latest version of these objects


NO_RELATED_OBJECTS = RelatedObjects()


def has_claims(pod: core.Pod) -> bool:
    """True if a volume of the pod has a claim."""
    return any(volume.persistent_volume_claim or volume.ephemeral for volume in pod.spec.volumes)


def claims_of(pod: core.Pod, storage: Storage) -> Iterator[tuple[Key, wire_storage.Claim | None]]:
    """Yield the claims of the pod's volumes; None: missing. A pod without a uid does not exist yet: the claims of its
    ephemeral volumes are those that it will get."""
    for volume in pod.spec.volumes:
        key = pod.metadata.namespace, f"{pod.metadata.name}-{volume.name}"
        if volume.persistent_volume_claim is not None:
            key = pod.metadata.namespace, volume.persistent_volume_claim.claim_name
            yield key, storage.claims.get(key)
        elif volume.ephemeral is not None and pod.metadata.uid:
            yield key, storage.claims.get(key)
        elif volume.ephemeral is not None:
            yield key, wire_storage.Claim(metadata=core.Metadata(), spec=volume.ephemeral.volume_claim_template.spec)


def related_objects(
    pod: core.Pod, storage: Storage, known: Claims, *, version: int, group_count_min: int | None
) -> RelatedObjects:
    """Return the demands of these objects on the pod's node."""
    devices = claimed(pod, known)
    alternatives: list[Terms] = [*devices.alternatives]
    for key, claim in claims_of(pod, storage):
        terms = _reachable_nodes(key, claim, storage)
        if isinstance(terms, str):
            return RelatedObjects(problem=terms, devices=devices, version=version, group_count_min=group_count_min)
        if terms:
            alternatives.append(terms)
    return RelatedObjects(
        alternatives=tuple(alternatives), devices=devices, version=version, group_count_min=group_count_min
    )


def _reachable_nodes(key: Key, claim: wire_storage.Claim | None, storage: Storage) -> Terms | str:
    """Return the nodes that can reach the claim's volume, existing or to be created; otherwise why there are none."""
    name = f"claim {key[0]}/{key[1]}"
    if claim is None:
        return f"{name} does not exist"
    if claim.status.phase == "Lost":
        return f"{name} lost its volume"
    if claim.spec.volume_name:
        volume = storage.volumes.get(claim.spec.volume_name)
        return f"{name}: volume {claim.spec.volume_name} does not exist" if volume is None else _nodes(volume)
    return _reachable_nodes_unbound(name, claim, storage)


def _reachable_nodes_unbound(name: str, claim: wire_storage.Claim, storage: Storage) -> Terms | str:
    class_name = storage.class_of(claim)
    if not class_name:
        return f"{name} has neither a volume nor a storage class"
    storage_class = storage.classes.get(class_name)
    if storage_class is None:
        return f"{name} has no volume, and its storage class {class_name} does not exist"
    if storage_class.volume_binding_mode == "Immediate":
        return f"{name} has no volume yet; storage class {class_name} provisions it before the pod is scheduled"
    if storage_class.provisioner != NO_PROVISIONER:
        return tuple(
            NodeSelectorTerm(
                tuple(LabelRequirement(_key(item.key), "In", item.values) for item in term.match_label_expressions)
            )
            for term in storage_class.allowed_topologies
        )
    reached = storage.reach_available(class_name)
    return f"{name} has no volume, and storage class {class_name} has no available one" if reached is None else reached


def _is_default(storage_class: wire_storage.StorageClass) -> bool:
    return storage_class.metadata.annotations.get(DEFAULT_CLASS) == "true"


def _nodes(volume: wire_storage.PersistentVolume) -> Terms:
    affinity = volume.spec.node_affinity
    required = None if affinity is None else affinity.required
    return tuple(
        NodeSelectorTerm(
            tuple(
                LabelRequirement(_key(item.key), item.operator, item.values)
                for item in requirements(term.match_expressions) + requirements(term.match_fields)
            )
        )
        for term in (required.node_selector_terms if required else ())
    )


def _key(key: str) -> str:
    return labels.ZONE if key in _ZONE_KEYS else key


# ---- PodDisruptionBudgets. Source: Kubernetes API reference v1.36, "PodDisruptionBudget" (read 2026-11-21).

# Never satisfied, as no label has an empty key.
_SELECTS_NOTHING = LabelRequirement("", "Exists")


def budget_observed(budget: core.PodDisruptionBudget, *, epoch: int) -> PodBudgetObserved:
    """Return the PodDisruptionBudget as a fact. A status older than its spec allows nothing, as for evictions."""
    status = budget.status
    is_current = status.observed_generation >= budget.metadata.generation
    return PodBudgetObserved(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
        match_labels=_selector(budget.spec.selector),
        disruptions_allowed=status.disruptions_allowed if is_current else 0,
        pods_healthy_count=status.current_healthy,
        pods_healthy_count_min=status.desired_healthy,
    )


def budget_gone(budget: core.PodDisruptionBudget, *, epoch: int) -> PodBudgetGone:
    """Return the deletion of the PodDisruptionBudget as a fact."""
    return PodBudgetGone(
        epoch=epoch,
        version=budget.version,
        budget_uid=budget.metadata.uid,
        namespace=budget.metadata.namespace,
        name=budget.metadata.name,
    )


def _selector(selector: core.LabelSelector | None) -> tuple[LabelRequirement, ...]:
    if selector is None:
        return (_SELECTS_NOTHING,)
    equal = tuple(LabelRequirement(key, "In", (value,)) for key, value in sorted(selector.match_labels.items()))
    return equal + requirements(selector.match_expressions)


# ---- ResourceQuotas. Source: Kubernetes documentation, "Resource Quotas" (read 2026-11-23).

# Of the keys of a quota, those that pods count against.
_POD_KEYS = frozenset({"cpu", "memory", "ephemeral-storage", "pods", "count/pods"})
_POD_KEY_PREFIXES = ("requests.", "limits.")
_NOT_OF_PODS = frozenset({"requests.storage"})  # of claims


def quota_observed(quota: core.ResourceQuota, *, epoch: int) -> PodQuotaObserved:
    """Return the ResourceQuota as a fact. Raises PermanentError for an amount that is no quantity."""
    selector = quota.spec.scope_selector
    expressions = () if selector is None else selector.match_expressions or ()
    scopes = (
        *(LabelRequirement(scope, "Exists") for scope in quota.spec.scopes),
        *(LabelRequirement(item.scope_name, item.operator, item.values) for item in expressions),
    )
    return PodQuotaObserved(
        epoch=epoch,
        version=quota.version,
        quota_uid=quota.metadata.uid,
        namespace=quota.metadata.namespace,
        name=quota.metadata.name,
        hard_milli=_amounts_of_pods(quota, quota.spec.hard),
        used_milli=_amounts_of_pods(quota, quota.status.used),
        scopes=scopes,
    )


def quota_gone(quota: core.ResourceQuota, *, epoch: int) -> PodQuotaGone:
    """Return the deletion of the ResourceQuota as a fact."""
    return PodQuotaGone(
        epoch=epoch,
        version=quota.version,
        quota_uid=quota.metadata.uid,
        namespace=quota.metadata.namespace,
        name=quota.metadata.name,
    )


def _amounts_of_pods(quota: core.ResourceQuota, amounts: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    keys = (key for key in sorted(amounts) if _is_of_pods(key))
    try:
        return tuple((key, parse_quantity_milli(amounts[key])) for key in keys)
    except ValueError as exc:
        raise PermanentError(f"ResourceQuota {quota.metadata.namespace}/{quota.metadata.name}: {exc}") from exc


def _is_of_pods(key: str) -> bool:
    return key in _POD_KEYS or (key.startswith(_POD_KEY_PREFIXES) and key not in _NOT_OF_PODS)
