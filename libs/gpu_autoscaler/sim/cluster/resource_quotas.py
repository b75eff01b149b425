"""ResourceQuotas of the simulated API server: they refuse the creation of pods, and report what is used.

Use grows with each admitted pod and shrinks a moment after pods end, when the quota controller has counted again. The
core's arithmetic of quotas is not used here, and is thereby tested.

Source: Kubernetes documentation, "Resource Quotas"; kubernetes `pkg/quota/v1/evaluator/core/pods.go` (read 2026-11-27).
"""

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import NAMESPACES, NETWORK_POLICIES, PODS, QUOTAS, SERVICE_ACCOUNTS
from gpu_autoscaler.kube.translate.pod import pod_requests
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes
from gpu_autoscaler.sim.virtual_time import VirtualLoop

COUNTED_SECONDS = 1.0  # until ended pods no longer count
_FINISHED = ("Succeeded", "Failed")
KINDS = (NAMESPACES, QUOTAS, NETWORK_POLICIES, SERVICE_ACCOUNTS)


class ResourceQuotas:
    """Admission and controller of ResourceQuotas without scopes."""

    def __init__(self, cluster: Kubernetes, loop: VirtualLoop) -> None:
        self.refused_listeners: list[Callable[[core.Pod, core.ResourceQuota], None]] = []
        self._cluster, self._loop = cluster, loop
        self._is_counting = False
        cluster.serve(*KINDS)
        cluster.listen(self._on_change)

    def admits(self, pod: core.Pod) -> bool:
        """Take what the pod needs from the quotas of its namespace; False: one of them has too little."""
        quotas = self._of_namespace(pod.metadata.namespace)
        for quota in quotas:
            used = {key: int(quota.status.used.get(key, "0")) for key in quota.spec.hard}
            if any(used[key] + _amount(key, pod) > int(hard) for key, hard in quota.spec.hard.items()):
                for listener in self.refused_listeners:
                    listener(pod, quota)
                return False
        for quota in quotas:
            used = {key: int(quota.status.used.get(key, "0")) + _amount(key, pod) for key in quota.spec.hard}
            self._report(quota, used)
        return True

    def _of_namespace(self, namespace: str) -> list[core.ResourceQuota]:
        return [quota for quota in self._cluster.all(QUOTAS) if quota.metadata.namespace == namespace]

    def _on_change(self, plural: str, entry: Entry) -> None:
        item = entry.object
        has_ended = isinstance(item, core.Pod) and (entry.is_deleted or item.status.phase in _FINISHED)
        if (has_ended or plural == QUOTAS.plural) and not self._is_counting:
            self._is_counting = True
            self._loop.call_later(COUNTED_SECONDS, self._count)

    def _count(self) -> None:
        self._is_counting = False
        for quota in self._cluster.all(QUOTAS):
            used: Counter[str] = Counter()
            for pod in self._cluster.all(PODS):
                if pod.metadata.namespace == quota.metadata.namespace and pod.status.phase not in _FINISHED:
                    used.update({key: _amount(key, pod) for key in quota.spec.hard})
            self._report(quota, {key: used[key] for key in quota.spec.hard})

    def _report(self, quota: core.ResourceQuota, used: dict[str, int]) -> None:
        status = core.QuotaStatus(used={key: str(amount) for key, amount in used.items()})
        if status != quota.status:
            self._cluster.put(QUOTAS, replace(quota, status=status))


def _amount(key: str, pod: core.Pod) -> int:
    """Return what the pod counts against a key of the simulated quotas, which are GPUs and pods."""
    return 1 if key == "pods" else pod_requests(pod).gpu_count
