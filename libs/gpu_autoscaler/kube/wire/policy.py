"""The structs of `AutoscalingPolicy` (`gpu-autoscaler.io/v1alpha1`). `contracts/policy_crd.py` generates the CRD from
them, so that the API server checks every range below.

Percentages and camelCase exist only here; `kube/translate/policy.py` converts them. Only the name of a pool is
required: omitted fields keep the value of the policy file. Source of the field names: docs/decisions.md#policy-object;
of the two forms of a share: docs/decisions.md#shares.
"""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.kube.wire import core

GROUP, VERSION, KIND, PLURAL = "gpu-autoscaler.io", "v1alpha1", "AutoscalingPolicy", "autoscalingpolicies"
DEFINITION = f"{PLURAL}.{GROUP}"
PATH = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
DEFINITION_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{DEFINITION}"

POOLS_COUNT_MAX = 64
_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[int, Meta(ge=0, le=604_800)]
_Count = Annotated[int, Meta(ge=0, le=100_000)]
_RatioOrPercentage = Annotated[float, Meta(ge=0, le=100)]  # up to 1 a ratio, above 1 a percentage
_Names = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=63)], ...], Meta(max_length=64)]
CapacityChoice = Literal["spot", "on-demand", "reserved", "mixed"]


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=False):
    """camelCase names, unknown fields ignored."""


class PoolSpec(_Wire, frozen=True, kw_only=True):
    """A pool of nodes that are bought by the same rules. Empty lists allow all available offers."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=63,
            pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            description="Name of the pool, unique over all policies.",
        ),
    ]
    min_size: Annotated[_Count, Meta(description="Minimum number of nodes.")] = 0
    max_size: Annotated[_Count | None, Meta(description="Maximum number of nodes; unset: maxNodes.")] = None
    gpu_type: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        Meta(description="GPU model, such as A100 or NVIDIA-A100-SXM4-80GB; unset: any."),
    ] = None
    gpu_memory_gib: Annotated[
        _Count | None, Meta(description="Minimum memory of one GPU in GiB, such as 80 of an A100; unset: any.")
    ] = None
    instance_types: Annotated[_Names, Meta(description="Allowed instance types; empty: all.")] = ()
    capacity_type: Annotated[
        CapacityChoice, Meta(description="Allowed capacity type; mixed: by the cluster's shares.")
    ] = "mixed"
    spot_percentage: Annotated[
        _RatioOrPercentage | None,
        Meta(
            description="Minimum share of spot in this pool, up to 1 as a ratio (0.6), above 1 as a percentage (60). "
            "0: never spot, 1 or 100: only spot. Unset: the cluster's shares apply."
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)], Meta(description="Purchases try pools of higher priority first.")
    ] = 0
    labels: Annotated[
        dict[str, Annotated[str, Meta(max_length=63)]],
        Meta(
            max_length=32,
            description="Labels of the pool's nodes. gpu-autoscaler.io/capacity-type and gpu-autoscaler.io/gpu-model "
            "restrict what is bought.",
        ),
    ] = {}
    availability_zones: Annotated[_Names, Meta(description="Allowed zones; empty: all.")] = ()
    idle_seconds: Annotated[
        _Seconds | None, Meta(description="Time after which an empty node is removed; unset: that of the policy.")
    ] = None


class PolicySpec(_Wire, frozen=True, kw_only=True):
    """Pools of nodes and thresholds. Omitted fields keep the value of the policy file."""

    enabled: Annotated[bool, Meta(description="If false, pools neither scale up nor down.")] = True
    provider: Annotated[
        Literal["aws", "gcp", "azure", "karpenter", "sim"] | None,
        Meta(description="Cloud of this policy; a cluster in another cloud refuses it."),
    ] = None
    scale_up_threshold: Annotated[
        _Share | None, Meta(description="GPU utilization of the cluster above which nodes are added.")
    ] = None
    scale_down_threshold: Annotated[
        _Share | None, Meta(description="GPU utilization of a node below which it may be removed.")
    ] = None
    scale_up_cooldown_seconds: Annotated[_Seconds | None, Meta(description="Minimum time between two purchases.")] = (
        None
    )
    scale_down_cooldown_seconds: Annotated[
        _Seconds | None,
        Meta(
            description="Minimum time that a node is kept after it became usable, and pause of a pool after a plan "
            "that removes nodes of it by choice."
        ),
    ] = None
    pending_pod_timeout_seconds: Annotated[
        _Seconds | None, Meta(description="Maximum time that a pod waits for running work to free capacity.")
    ] = None
    min_nodes: Annotated[_Count, Meta(description="Minimum number of nodes over all its pools.")] = 0
    max_nodes: Annotated[_Count | None, Meta(description="Maximum number of nodes over all its pools.")] = None
    spot_instance_percentage: Annotated[
        _RatioOrPercentage | None,
        Meta(
            description="Minimum share of spot among the GPUs of all pools without spotPercentage, up to 1 as a ratio "
            "(0.6), above 1 as a percentage (60)."
        ),
    ] = None
    enable_spot_instances: Annotated[bool, Meta(description="If false, its pools use no spot.")] = True
    enable_multi_tier_scaling: Annotated[
        bool | None, Meta(description="If false, reserved capacity has no share beside spot and on-demand.")
    ] = None
    enable_predictive_scaling: Annotated[
        bool | None,
        Meta(description="If true, demand is forecast, and capacity is bought ahead once forecasts are accurate."),
    ] = None
    idle_seconds: Annotated[
        _Seconds | None,
        Meta(description="Time after which an empty node of its pools is removed; unset: the break-even rule decides."),
    ] = None
    node_pools: Annotated[
        tuple[PoolSpec, ...],
        Meta(min_length=1, max_length=POOLS_COUNT_MAX, description="Pools in which nodes may be bought."),
    ]


class PolicyCondition(_Wire, frozen=True, kw_only=True):
    """A status condition of the policy. Source: Kubernetes API conventions, "Typical status properties"."""

    type: Annotated[str, Meta(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    message: Annotated[str, Meta(max_length=32768)]
    last_transition_time: datetime
    observed_generation: int = 0


class PoolStatus(_Wire, frozen=True, kw_only=True):
    """The nodes of a pool."""

    name: str
    nodes: Annotated[int, Meta(description="Nodes that accept work.")] = 0
    pending: Annotated[int, Meta(description="Nodes that are launching or booting.")] = 0
    terminating: Annotated[int, Meta(description="Nodes that are being drained or terminated.")] = 0
    gpus: Annotated[int, Meta(description="GPUs of the nodes that accept work.")] = 0


class PolicyStatus(_Wire, frozen=True, kw_only=True):
    """The status of the policy, written only by gpu-autoscaler."""

    observed_generation: Annotated[int, Meta(description="Generation that this status describes.")] = 0
    active_generation: Annotated[
        int | None, Meta(description="Generation that is active; unset: this policy is not active.")
    ] = None
    active_spec: Annotated[PolicySpec | None, Meta(description="The active spec, if it is an older generation.")] = None
    nodes: Annotated[int, Meta(description="Nodes of its pools that accept work.")] = 0
    nodes_pending: Annotated[int, Meta(description="Nodes that are launching or booting.")] = 0
    nodes_desired: Annotated[int, Meta(description="Nodes that accept work, are launching or booting.")] = 0
    gpus: Annotated[int, Meta(description="GPUs of the nodes that accept work.")] = 0
    spot_percentage: Annotated[
        int | None, Meta(description="Share of spot among the nodes that accept work; unset: there are none.")
    ] = None
    price_usd_per_hour: Annotated[
        str | None, Meta(description="Price of all its nodes; unset: a price is unknown.")
    ] = None
    spent_today_usd: Annotated[str | None, Meta(description="Cost since midnight UTC.")] = None
    spent_this_month_usd: Annotated[str | None, Meta(description="Cost since the start of the month, UTC.")] = None
    pools: tuple[PoolStatus, ...] = ()
    conditions: tuple[PolicyCondition, ...] = ()


class Policy(core.Object, frozen=True, kw_only=True):
    """An AutoscalingPolicy. Its spec is decoded separately (`spec_of`): an invalid one must not end the watch."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")
