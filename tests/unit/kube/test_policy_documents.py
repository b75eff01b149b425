"""AutoscalingPolicy objects as documents: both forms of a share, labels as filters, product names of GPUs."""

import json
from typing import Any

import msgspec
import pytest
from tests.support.kube_policies import policy
from tests.support.sources import autoscaling_policy

from gpu_autoscaler.core.policy.documents import document_violations, merge_documents
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool
from gpu_autoscaler.kube.translate.policy import document, ratio_of, spec_of
from gpu_autoscaler.kube.wire.policy import Policy
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import PolicyDocument


def read(body: dict[str, Any]) -> PolicyDocument:
    """The document of the object, as the policy watcher reads it."""
    found = msgspec.json.decode(json.dumps(body), type=Policy)
    return document(found, spec_of(found), 1)


@pytest.mark.parametrize(
    ("share", "ratio"), [(None, None), (0, 0.0), (0.6, 0.6), (1, 1.0), (1.0, 1.0), (60, 0.6), (100, 1.0)]
)
def test_a_share_is_a_ratio_or_a_percentage(share: float | None, ratio: float | None) -> None:
    """Up to 1 a ratio, above 1 a percentage; both fields take both forms."""
    assert ratio_of(share) == ratio
    known = {} if share is None else {"spotInstancePercentage": share}
    pool = {"name": "a"} | ({} if share is None else {"spotPercentage": share})
    found = read(policy("a", nodePools=[pool], **known))
    assert (found.spot_ratio, found.pools[0].spot_ratio) == (ratio, ratio)


def test_the_policy_of_the_autoscaling_guide_means_what_it_says() -> None:
    """Unchanged: its pool buys V100 on spot in its zones, up to its size, by its thresholds."""
    found = read(autoscaling_policy())
    assert list(document_violations(found, (), DEFAULT_POLICY, "aws")) == []
    merged = merge_documents(DEFAULT_POLICY, [found])
    assert merged.pools == (
        NodePool(
            name="spot-pool", priority=10, nodes_count_max=50, gpu_models=("V100",),
            instance_types=("p3.2xlarge", "p3.8xlarge"), capacity_types=(CapacityType.SPOT,), spot_ratio=1.0,
            zones=("us-west-2a", "us-west-2b", "us-west-2c"),
        ),
    )  # fmt: skip
    assert (merged.nodes_count_min, merged.nodes_count_max) == (0, 100)
    assert (merged.utilization.high_ratio, merged.utilization.low_ratio) == (0.8, 0.2)
    assert (merged.limits.scale_up_cooldown_seconds, merged.pending_pod_timeout_seconds) == (180, 120)
    assert merged.scale_down_cooldown_seconds == merged.removal.pool_cooldown_seconds == 600
    assert not merged.forecast.is_on


def test_a_label_of_the_capacity_type_restricts_the_pool() -> None:
    """Without capacityType it stands for it; spot that is switched off contradicts it."""
    label = {"gpu-autoscaler.io/capacity-type": "on-demand", "team": "v"}
    (pool,) = merge_documents(DEFAULT_POLICY, [read(policy("a", nodePools=[{"name": "a", "labels": label}]))]).pools
    assert (pool.capacity_types, pool.labels) == ((CapacityType.ON_DEMAND,), {"team": "v"})
    label["gpu-autoscaler.io/capacity-type"] = "spot"
    off = read(policy("a", enableSpotInstances=False, nodePools=[{"name": "a", "labels": label}]))
    (violation,) = document_violations(off, (), DEFAULT_POLICY, "aws")
    assert "gpu-autoscaler.io/capacity-type=spot contradicts" in violation
