"""vCPU quotas by instance family and purchase option, and the types that they rule out.

Source: EC2 User Guide, "Amazon EC2 service quotas"; Service Quotas console, "Amazon EC2" (read 2026-11-21). GPU quotas
are often 0 in an account that never requested them.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

import msgspec
import structlog

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.aws.client import AwsClient
from gpu_autoscaler.providers.aws.translate import InstanceType

QUOTAS_KEPT = timedelta(minutes=10)  # docs/decisions.md#quotas: as the back-off of a quota refusal
# Code -> instance families and purchase option.
GPU_QUOTAS: Mapping[str, tuple[tuple[str, ...], CapacityType]] = {
    "L-DB2E81BA": (("g*",), CapacityType.ON_DEMAND),
    "L-3819A6DF": (("g*",), CapacityType.SPOT),
    "L-417A185B": (("p*",), CapacityType.ON_DEMAND),
    "L-7212CCBC": (("p2.*", "p3.*", "p4*"), CapacityType.SPOT),
    "L-C4BD4855": (("p5*",), CapacityType.SPOT),
}

log = structlog.get_logger()


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Number of vCPUs that may run at once."""

    code: str
    name: str
    vcpus_max: int


async def read_quotas(client: AwsClient) -> dict[str, Quota]:
    """Return the GPU quotas by code. Raises TransientError, PermanentError."""
    return {
        quota["QuotaCode"]: Quota(code=quota["QuotaCode"], name=quota["QuotaName"], vcpus_max=int(quota["Value"]))
        for quota in await client.items("ListServiceQuotas", "Quotas", ServiceCode="ec2", MaxResults=100)
        if quota["QuotaCode"] in GPU_QUOTAS
    }


def quota_of(instance_type: str, capacity_type: CapacityType) -> str | None:
    """Return the code of the quota that the type counts against; None if it is not a GPU quota."""
    for code, (patterns, of) in GPU_QUOTAS.items():
        if of is capacity_type and any(fnmatchcase(instance_type, pattern) for pattern in patterns):
            return code
    return None


class KnownQuotas:
    """Quotas as last read. Unreadable quotas exclude nothing: the cloud's refusal shows them."""

    def __init__(self, client: AwsClient) -> None:
        self._client = client
        self._quotas: Mapping[str, Quota] = {}
        self._read_at: datetime | None = None

    async def refresh(self, now: datetime) -> None:
        """Read them again when outdated. Never raises: a failure is logged, and known quotas stay."""
        if self._read_at is not None and now - self._read_at < QUOTAS_KEPT:
            return
        self._read_at = now
        try:
            self._quotas = await read_quotas(self._client)
        except AutoscalerError as exc:
            log.warning("quota lookup failed", error=str(exc), effect="exhausted quotas surface as launch refusals")

    def shortfall(self, kind: InstanceType, capacity_type: CapacityType) -> str | None:
        """Return why not even one instance of this type fits its quota; None if one does, or the quota is unknown."""
        quota = self._quotas.get(quota_of(kind.name, capacity_type) or "")
        if quota is None or kind.vcpu_count <= quota.vcpus_max:
            return None
        return (
            f"quota {quota.code} ({quota.name}) is {quota.vcpus_max} vCPUs in {self._client.region}, and one"
            f" {kind.name} needs {kind.vcpu_count}; request an increase in Service Quotas"
        )
