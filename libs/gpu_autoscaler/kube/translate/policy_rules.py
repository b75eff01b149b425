"""Rules of `AutoscalingPolicy` beyond types and ranges, each in CEL for the API server and in Python for files.

`contracts/policy_crd.py` writes the CEL into the CRD. The maximum lengths of the structs bound the cost of a rule.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from gpu_autoscaler.kube.wire.policy import PolicySpec, PoolSpec
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.offers import CapacityType

T = TypeVar("T")

_CAPACITY_TYPES = tuple(map(str, CapacityType))
_FILTER_LABELS = (labels.CAPACITY_TYPE, labels.GPU_MODEL)


class Rule(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One rule; `holds` and `cel` decide the same."""

    cel: str
    message: str
    holds: Callable[[T], bool]


RULES_OF_POLICY: tuple[Rule[PolicySpec], ...] = (
    Rule(
        cel="!has(self.maxNodes) || self.minNodes <= self.maxNodes",
        message="minNodes is above maxNodes; lower it, or raise maxNodes",
        holds=lambda spec: spec.max_nodes is None or spec.min_nodes <= spec.max_nodes,
    ),
    Rule(
        cel="!has(self.scaleUpThreshold) || !has(self.scaleDownThreshold)"
        " || self.scaleDownThreshold < self.scaleUpThreshold",
        message="scaleDownThreshold is not below scaleUpThreshold: new nodes would be removed at once; lower it",
        holds=lambda spec: (
            spec.scale_up_threshold is None
            or spec.scale_down_threshold is None
            or spec.scale_down_threshold < spec.scale_up_threshold
        ),
    ),
    Rule(
        cel="!has(self.maxNodes) || self.nodePools.map(pool, pool.minSize).sum() <= self.maxNodes",
        message="minSize of all pools adds up to more than maxNodes; lower one of them, or raise maxNodes",
        holds=lambda spec: spec.max_nodes is None or sum(pool.min_size for pool in spec.node_pools) <= spec.max_nodes,
    ),
    Rule(
        cel="self.enableSpotInstances || self.nodePools.all(pool, pool.capacityType != 'spot')",
        message="a pool has capacityType spot, but enableSpotInstances is false; enable it, or change capacityType",
        holds=lambda spec: spec.enable_spot_instances or all(pool.capacity_type != "spot" for pool in spec.node_pools),
    ),
    Rule(
        cel="self.enableSpotInstances || !has(self.spotInstancePercentage) || self.spotInstancePercentage == 0.0",
        message="spotInstancePercentage is above 0, but enableSpotInstances is false; enable it, or set 0",
        holds=lambda spec: spec.enable_spot_instances or not spec.spot_instance_percentage,
    ),
)
RULES_OF_POOL: tuple[Rule[PoolSpec], ...] = (
    Rule(
        cel="!has(self.maxSize) || self.minSize <= self.maxSize",
        message="minSize is above maxSize; lower it, or raise maxSize",
        holds=lambda pool: pool.max_size is None or pool.min_size <= pool.max_size,
    ),
    Rule(
        cel="!has(self.maxSize) || self.maxSize > 0",
        message="maxSize is 0; raise it, or remove the pool",
        holds=lambda pool: pool.max_size != 0,
    ),
    Rule(
        cel="!has(self.spotPercentage) || self.capacityType == 'mixed'"
        " || self.capacityType == 'spot' && self.spotPercentage in [1.0, 100.0]"
        " || self.capacityType != 'spot' && self.spotPercentage == 0.0",
        message="spotPercentage contradicts capacityType; use capacityType mixed, or remove spotPercentage",
        holds=lambda pool: (
            pool.capacity_type == "mixed"
            or pool.spot_percentage in ((None, 1, 100) if pool.capacity_type == "spot" else (None, 0))
        ),
    ),
    Rule(
        cel="self.labels.all(key, !key.startsWith('gpu-autoscaler.io/')"
        " || key in ['gpu-autoscaler.io/capacity-type', 'gpu-autoscaler.io/gpu-model'])",
        message="labels with prefix gpu-autoscaler.io/ are written by the autoscaler, except capacity-type and "
        "gpu-model; remove them",
        holds=lambda pool: all(key in _FILTER_LABELS or not key.startswith(f"{labels.PREFIX}/") for key in pool.labels),
    ),
    Rule(
        cel="!('gpu-autoscaler.io/capacity-type' in self.labels)"
        " || self.labels['gpu-autoscaler.io/capacity-type'] in"
        " (self.capacityType == 'mixed' ? ['spot', 'on-demand', 'reserved'] : [self.capacityType])",
        message="label gpu-autoscaler.io/capacity-type is not spot, on-demand or reserved, or contradicts capacityType;"
        " change one of them",
        holds=lambda pool: (
            labels.CAPACITY_TYPE not in pool.labels
            or pool.labels[labels.CAPACITY_TYPE]
            in (_CAPACITY_TYPES if pool.capacity_type == "mixed" else (pool.capacity_type,))
        ),
    ),
)


def rule_violations(spec: PolicySpec) -> Iterator[str]:
    """Yield the messages of all rules that the spec breaks."""
    yield from (rule.message for rule in RULES_OF_POLICY if not rule.holds(spec))
    for pool in spec.node_pools:
        yield from (f"nodePools {pool.name}: {rule.message}" for rule in RULES_OF_POOL if not rule.holds(pool))
