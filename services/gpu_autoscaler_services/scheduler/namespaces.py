"""Creates the namespaces of projects, each with quota, network policy and service account. Every call is idempotent.

A namespace is complete before the first job is created in it. Its ResourceQuota follows the policy; everything else
is left as people change it.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import structlog

from gpu_autoscaler.core.demand.resource_quotas import created_quota
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.tenancy_settings import JOB_ACCOUNT, QUOTA_NAME
from gpu_autoscaler.kube.protocol import (
    NAMESPACES,
    NETWORK_POLICIES,
    QUOTAS,
    SERVICE_ACCOUNTS,
    Conflict,
    Kind,
    KubeApi,
    Now,
    Rejected,
)
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler_services.scheduler.binder import InvalidJob

# Objects that somebody deleted are created again, with a later job. Cluster time; project default.
REPEAT_SECONDS = 600.0
_NETWORK_POLICY = "gpu-autoscaler"
REMEMBERED_COUNT_MAX = 10_000  # namespaces; beyond, they are looked up again
# Addresses of clusters and their machines (RFC 1918).
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
_MANAGED = {"app.kubernetes.io/managed-by": "gpu-autoscaler"}

log = structlog.get_logger()


class ProjectNamespaces:
    """Remembers which namespaces are complete, and with which quota."""

    def __init__(self, kube: KubeApi, now: Now) -> None:
        """`now`: cluster time."""
        self._kube = kube
        self._now = now
        self._complete: dict[str, tuple[Mapping[str, str], datetime]] = {}  # its quota, and when it was complete

    async def ensure(self, spec: JobSpec, policy: ScalingPolicy) -> None:
        """Create what the job's namespace lacks, if the policy has the scheduler create it.

        Raises InvalidJob for a namespace of somebody else and for a refused quota, TransientError, PermanentError.
        """
        place = policy.tenancy.place(spec.project_id)
        if not place.is_created or place.namespace != spec.namespace:
            return
        quota, now = created_quota(spec.project_id, policy), self._now()
        known = self._complete.get(spec.namespace)
        if known is not None and known[0] == quota and now - known[1] < timedelta(seconds=REPEAT_SECONDS):
            return
        await self._ensure_namespace(spec)
        if quota:
            await self._ensure_quota(spec, quota)
        await self._make(NETWORK_POLICIES, spec, network_policy(spec, policy.tenancy.admitted_namespaces))
        await self._make(SERVICE_ACCOUNTS, spec, _object(spec, JOB_ACCOUNT, automountServiceAccountToken=False))
        if len(self._complete) >= REMEMBERED_COUNT_MAX:
            self._complete.clear()
        self._complete[spec.namespace] = (quota, now)

    async def _ensure_namespace(self, spec: JobSpec) -> None:
        if await self._make(NAMESPACES, spec, _object(spec, spec.namespace)):
            log.info("project namespace created", namespace=spec.namespace, project=spec.project_id)
            return
        namespace = await self._kube.get(NAMESPACES, "", spec.namespace)
        if namespace.metadata.labels.get(labels.PROJECT_ID) != spec.project_id:
            raise InvalidJob(
                f"namespace {spec.namespace} exists, and does not belong to project {spec.project_id}: label it "
                f"{labels.PROJECT_ID}={spec.project_id}, or map the project to a namespace in tenancy.projects of the "
                "policy; then submit the job again"
            )

    async def _ensure_quota(self, spec: JobSpec, quota: Mapping[str, str]) -> None:
        """Create the ResourceQuota, or give it the amounts of the policy."""
        wanted = {"hard": dict(quota)}
        try:
            if await self._make(QUOTAS, spec, _object(spec, QUOTA_NAME, spec=wanted)):
                return
            current = (await self._kube.get(QUOTAS, spec.namespace, QUOTA_NAME)).spec.hard
            if current != wanted["hard"]:
                dropped = dict.fromkeys(current.keys() - quota.keys())  # a merge patch removes what is null
                patch = {"spec": {"hard": {**dropped, **quota}}}
                await self._kube.change(QUOTAS, spec.namespace, QUOTA_NAME, patch)
        except Rejected as exc:
            raise InvalidJob(
                f"Kubernetes rejects the ResourceQuota of project {spec.project_id}; correct tenancy.quota of the "
                f"policy, then submit the job again: {exc}"
            ) from exc

    async def _make(self, kind: Kind[Any], spec: JobSpec, manifest: Mapping[str, Any]) -> bool:
        """Create the object; False if it exists."""
        namespace = "" if kind is NAMESPACES else spec.namespace
        try:
            await self._kube.make(kind, namespace, manifest)
        except Conflict:
            return False
        return True


def network_policy(spec: JobSpec, admitted_namespaces: tuple[str, ...]) -> dict[str, Any]:
    """Return the policy that isolates the tenant: its pods reach each other, DNS, and addresses outside of private
    networks. Pods of the tenant's namespaces and of admitted namespaces reach them."""
    tenant = [{"namespaceSelector": {"matchLabels": {labels.GPU_TENANT: spec.tenant}}}]
    by_name = "kubernetes.io/metadata.name"
    admitted = [{"namespaceSelector": {"matchLabels": {by_name: namespace}}} for namespace in admitted_namespaces]
    dns = {
        "ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")],
        "to": [{"namespaceSelector": {"matchLabels": {by_name: "kube-system"}}}],
    }
    outside = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}}]}
    rules = {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [*tenant, *admitted]}],
        "egress": [{"to": tenant}, dns, outside],
    }
    return _object(spec, _NETWORK_POLICY, spec=rules)


def _object(job: JobSpec, name: str, **fields: object) -> dict[str, Any]:
    cost = {labels.GPU_COST_CENTER: job.cost_center} if job.cost_center else {}
    own = {labels.PROJECT_ID: job.project_id, labels.GPU_PROJECT: job.project_id, labels.GPU_TENANT: job.tenant}
    return {"metadata": {"name": name, "labels": {**_MANAGED, **own, **cost}}, **fields}
