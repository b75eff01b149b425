"""Looks at the NodePools whose limits are ours to write, as a doctor would. Writes nothing."""

from collections.abc import AsyncIterator

from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.findings import Finding, warning, error, ok
from gpu_autoscaler.providers.karpenter.limits import LimitedPools
from gpu_autoscaler.providers.karpenter.node_pools import NodePool

_NEVER = "Never"


async def pool_findings(pools: LimitedPools) -> AsyncIterator[Finding]:
    """Yield what is right and wrong with each pool of the settings."""
    for name in pools.names:
        subject = f"NodePool {name}"
        try:
            selling, problem = await pools.seen(name)
        except AutoscalerError as exc:
            yield error(subject, str(exc), f"kubectl describe nodepool {name}")
            continue
        if problem is not None:
            yield error(subject, problem[1], f"kubectl edit nodepool {name}")
            continue
        own = _own_choices(selling.pool)
        said = f"makes {selling.offer.key} for pods that wait, {selling.pool.gpu_limit} GPUs are allowed"
        if own:
            step = f"set {' and '.join(own)} to {_NEVER}: who goes, and when, is the policy's to say"
            yield warning(subject, f"{said}; Karpenter ends its nodes by its own choice", step)
        else:
            yield ok(subject, said)


def buying_beside(pool: NodePool, ours: tuple[str, ...]) -> bool:
    """Return whether Karpenter may make GPUs of the pool that we did not allow."""
    return pool.metadata.name not in ours and str(pool.spec.limits.get(GPU_RESOURCE)) != "0"


def _own_choices(pool: NodePool) -> list[str]:
    choices = {
        "spec.disruption.consolidateAfter": pool.spec.disruption.consolidate_after,
        "spec.template.spec.expireAfter": pool.spec.template.spec.expire_after,
    }
    return [path for path, value in choices.items() if value != _NEVER]
