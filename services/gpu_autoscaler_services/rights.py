"""What each service may do in Kubernetes: what its door calls, and nothing else. The chart makes roles of it.

A new call of `kube/client.py` by a service is a line here; `tests/e2e/test_service_accounts.py` runs every service
under its own account and finds both what is missing and what is too much.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gpu_autoscaler.kube import wire_policy


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """Verbs on a resource. Everywhere, in the namespace of the jobs, or on one object of this name."""

    verbs: tuple[str, ...]
    resource: str  # with its subresource, as in pods/eviction
    group: str = ""
    name: str = ""
    is_for_jobs: bool = False  # in the namespace of the jobs alone


# Which cluster this is: the UID of this namespace (`KubeClient.cluster`).
WHICH_CLUSTER = Right(verbs=("get",), resource="namespaces", name="kube-system")
_READ = ("list", "watch")
_DEVICES = ("resourceclaims", "resourceclaimtemplates", "resourceslices", "deviceclasses")
# Kinds that others bring: asked for where they are installed (`kube/translate/progress.py`).
_OTHERS = (
    ("jobsets", "jobset.x-k8s.io"),
    ("pytorchjobs", "kubeflow.org"),
    ("rayjobs", "ray.io"),
    ("jobs", "batch.volcano.sh"),
)

RIGHTS: Mapping[str, tuple[Right, ...]] = {
    "pod_watcher": (
        WHICH_CLUSTER,
        Right(verbs=_READ, resource="pods"),
        Right(verbs=_READ, resource="nodes"),
        Right(verbs=_READ, resource="persistentvolumeclaims"),
        Right(verbs=_READ, resource="persistentvolumes"),
        Right(verbs=_READ, resource="storageclasses", group="storage.k8s.io"),
        Right(verbs=_READ, resource="poddisruptionbudgets", group="policy"),
        Right(verbs=_READ, resource="jobs", group="batch"),
        *(Right(verbs=_READ, resource=resource, group=group) for resource, group in _OTHERS),
        *(Right(verbs=_READ, resource=resource, group="resource.k8s.io") for resource in _DEVICES),
        Right(verbs=_READ, resource="podgroups", group="scheduling.x-k8s.io"),
        Right(verbs=_READ, resource="podgroups", group="scheduling.volcano.sh"),
    ),
    "dcgm_ingest": (),
    "spot_watcher": (WHICH_CLUSTER,),  # in the role that reads the cloud centrally: whose instances it asks about
    "scheduler": (
        WHICH_CLUSTER,
        Right(verbs=("create", "get", "patch", "delete"), resource="jobs", group="batch", is_for_jobs=True),
        *(
            Right(verbs=("create", "get", "patch", "delete"), resource=resource, group=group, is_for_jobs=True)
            for resource, group in _OTHERS
        ),
        Right(verbs=("create",), resource="services", is_for_jobs=True),  # names for the members of a gang
        Right(verbs=("list",), resource="pods"),  # of a node: it does not say in which namespaces they are
        Right(verbs=("patch",), resource="pods", is_for_jobs=True),  # to tell them to save
    ),
    "scaler": (
        WHICH_CLUSTER,
        # Deleted are those of ours whose instance is gone, where no cloud controller does it.
        Right(verbs=("get", "list", "patch", "delete"), resource="nodes"),
        Right(verbs=("list",), resource="volumeattachments", group="storage.k8s.io"),
        Right(verbs=("list", "patch", "delete"), resource="pods"),
        Right(verbs=("create",), resource="pods/eviction"),
        Right(verbs=("patch",), resource="pods/status"),  # to mark what is deleted at its deadline
        # To show who leads, where that is asked for.
        Right(verbs=("create", "get", "patch"), resource="leases", group="coordination.k8s.io", is_for_jobs=True),
    ),
    "shadow": (),
    "announcer": (
        WHICH_CLUSTER,
        Right(verbs=("create", "get", "patch"), resource="events"),
    ),
    "policy_watcher": (
        WHICH_CLUSTER,
        Right(verbs=_READ, resource=wire_policy.PLURAL, group=wire_policy.GROUP),
        Right(verbs=("patch",), resource=f"{wire_policy.PLURAL}/status", group=wire_policy.GROUP),
        Right(
            verbs=("get",),
            resource="customresourcedefinitions",
            group="apiextensions.k8s.io",
            name=wire_policy.DEFINITION,
        ),
        Right(verbs=("create", "get", "patch"), resource="events"),
    ),
    "cost_tracker": (),
    "gateway": (  # whose token is it, and what may they do: only where that is asked of Kubernetes
        WHICH_CLUSTER,
        Right(verbs=("create",), resource="tokenreviews", group="authentication.k8s.io"),
        Right(verbs=("create",), resource="subjectaccessreviews", group="authorization.k8s.io"),
    ),
}


# Only where nodes are bought through Karpenter. What its node classes are called is its cloud's to say: the chart adds
# the right to get the one that is named.
RIGHTS_WITH_KARPENTER: Mapping[str, tuple[Right, ...]] = {
    "scaler": (
        Right(verbs=("create", "get", "list", "patch", "delete"), resource="nodeclaims", group="karpenter.sh"),
        Right(verbs=("list",), resource="events"),  # why it did not launch what it was asked for
    ),
    "spot_watcher": (
        Right(verbs=("list",), resource="nodeoverlays", group="karpenter.sh"),
    ),  # what users say of prices
}
# Beside those, only where the limits of NodePools are ours to write.
RIGHTS_WITH_LIMITS: Mapping[str, tuple[Right, ...]] = {
    "scaler": (Right(verbs=("get", "patch"), resource="nodepools", group="karpenter.sh"),),
    "spot_watcher": (Right(verbs=("get",), resource="nodepools", group="karpenter.sh"),),
}


def rules_with_karpenter(service: str, *, has_limits: bool) -> list[dict[str, Any]]:
    """The rules that a ClusterRole has beside, where Karpenter is the provider. `has_limits`: with mode limits."""
    limits = RIGHTS_WITH_LIMITS.get(service, ()) if has_limits else ()
    return [_rule(right) for right in (*RIGHTS_WITH_KARPENTER.get(service, ()), *limits)]


def rules(service: str, *, is_for_jobs: bool) -> list[dict[str, Any]]:
    """The rules of a Role (for the namespace of the jobs) or of a ClusterRole, as Kubernetes has them."""
    return [_rule(right) for right in RIGHTS[service] if right.is_for_jobs == is_for_jobs]


def _rule(right: Right) -> dict[str, Any]:
    rule: dict[str, Any] = {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
    return rule | ({"resourceNames": [right.name]} if right.name else {})
