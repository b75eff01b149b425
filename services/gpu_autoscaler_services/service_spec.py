"""The declaration of a service: its class, composition, Kubernetes rights, broker extras and processes.

Each service folder declares `SPEC` in its `spec.py`; broker users, chart files and the launcher are made from them.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gpu_autoscaler.runtime.process import Compose
from gpu_autoscaler.runtime.service import Service

Role = Literal["nodes", "central"]
# `snapshots`: it reads the store at its start, if there is one.
Adapter = Literal["store", "snapshots", "policy", "kube", "cloud"]


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """Verbs on a Kubernetes resource: in all namespaces, in the jobs' namespace, or on one object.

    `tests/e2e/test_service_accounts.py` finds missing and unused rights.
    """

    verbs: tuple[str, ...]
    resource: str  # with its subresource, as in pods/eviction
    group: str = ""
    name: str = ""
    is_for_jobs: bool = False  # only in the namespace of the jobs


LIST_WATCH = ("list", "watch")
# `KubeClient.cluster`: the UID of this namespace identifies the cluster.
CLUSTER_IDENTITY = Right(verbs=("get",), resource="namespaces", name="kube-system")
# The third-party job kinds of `kube/translate/workload_progress.py`.
JOB_KINDS = (
    ("jobsets", "jobset.x-k8s.io"),
    ("pytorchjobs", "kubeflow.org"),
    ("rayjobs", "ray.io"),
    ("jobs", "batch.volcano.sh"),
)


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process: a child of the launcher, a container of docker-compose.yml, a workload of the chart."""

    name: str
    chart_name: str = ""  # if it differs
    role: Role | None = None  # `sensing.role`
    uses: tuple[Adapter, ...] = ()  # as the chart configures it
    chart_replicas: int | None = None  # the default; None: always one
    # When the launcher starts it; `node_watchers`: never, because only the chart runs a watcher on each node.
    condition: Literal["always", "shadow_policy", "real_cluster", "node_watchers"] = "always"
    is_observer: bool = False  # also started by `gpu-autoscaler observe`, which changes nothing


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `rights_with_limits` are added to `rights_with_karpenter` in Karpenter's mode limits."""

    service: type[Service]
    compose: Compose
    processes: tuple[Process, ...]
    rights: tuple[Right, ...] = ()
    rights_with_karpenter: tuple[Right, ...] = ()
    rights_with_limits: tuple[Right, ...] = ()
    rights_with_quotas: tuple[Right, ...] = ()  # where kube.are_quotas_watched is set
    rights_with_provisioning: tuple[Right, ...] = ()  # where kube.are_provisioning_requests_served is set
    # Where the policy has the scheduler create namespaces; the rights for jobs then hold in all namespaces.
    rights_with_namespaces: tuple[Right, ...] = ()
    has_lease: bool = False
    reads: tuple[str, ...] = ()  # streams that it reads besides its consumers
    answers: tuple[str, ...] = ()  # subjects of requests that it answers

    @property
    def name(self) -> str:
        """The service's name, also that of its folder."""
        return self.service.name

    def rules(self, *, is_for_jobs: bool) -> list[dict[str, Any]]:
        """Return the RBAC rules of its ClusterRole, or of its Role in the jobs' namespace."""
        return rules_of(right for right in self.rights if right.is_for_jobs == is_for_jobs)

    def karpenter_rules(self, *, has_limits: bool) -> list[dict[str, Any]]:
        """Return the RBAC rules that Karpenter as provider adds. `has_limits`: in mode limits."""
        limits = self.rights_with_limits if has_limits else ()
        return rules_of((*self.rights_with_karpenter, *limits))


def rules_of(rights: Iterable[Right]) -> list[dict[str, Any]]:
    """Return the RBAC rules of these rights."""
    return [_rule(right) for right in rights]


def _rule(right: Right) -> dict[str, Any]:
    rule: dict[str, Any] = {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
    return rule | ({"resourceNames": [right.name]} if right.name else {})
