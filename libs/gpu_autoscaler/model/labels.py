"""Label, annotation and tag keys that we read or write. They are contracts: none may change."""

import re
from collections.abc import Mapping

PREFIX = "gpu-autoscaler.io"

ACTION_ID = f"{PREFIX}/action-id"  # on nodes and instances: the decision that bought them
INSTALLATION = f"{PREFIX}/installation"  # on nodes and instances: UID of the kube-system namespace
POOL = f"{PREFIX}/pool"
GPU_MODEL = f"{PREFIX}/gpu-model"
CAPACITY_TYPE = f"{PREFIX}/capacity-type"
WORKLOAD_TYPE = f"{PREFIX}/workload-type"
PLAIN_WORKLOAD_TYPE = "workload-type"  # as users have it already; read where the label above is not set
JOB_ID = f"{PREFIX}/job-id"  # on Kubernetes Jobs and pods that the binder makes
MIN_MEMBERS = f"{PREFIX}/min-members"  # annotation of Kubernetes Jobs: minimum number of members; none: all
TAKEN_AWAY = f"{PREFIX}/taken-away"  # on Jobs that the binder recreates: their end is not the job's
PROJECT_ID = f"{PREFIX}/project-id"  # also on nodes: the project that they were bought for
# On the objects and pods of jobs, for cost reports and network policies (docs/decisions.md#projects-and-namespaces).
GPU_PROJECT, GPU_COST_CENTER, GPU_TENANT = "gpu-project", "gpu-cost-center", "gpu-tenant"
EVICTION_PRIORITY = f"{PREFIX}/eviction-priority"  # low, medium, high; low is evicted first
DO_NOT_DISRUPT = f"{PREFIX}/do-not-disrupt"
# On nodes whose GPUs have replicas: MiB of GPU memory that one replica can count on.
GPU_SHARE_MEMORY = f"{PREFIX}/gpu-share-memory"
CHECKPOINT_REQUESTED = f"{PREFIX}/checkpoint-requested"  # on pods: RFC 3339 deadline for saving a checkpoint
CHECKPOINT_REQUESTED_AT = f"{PREFIX}/checkpoint-requested-at"  # on pods: RFC 3339 time of that request
CHECKPOINT_HOOK = f"{PREFIX}/checkpoint-hook"  # on pods: port and path of a checkpoint hook, as `:8080/checkpoint`
CHECKPOINT_HOOK_FORM = re.compile(r":(\d{1,5})(/[^\s?#]*)?")
SIMULATED_RUN_SECONDS = "simcluster.gpu-autoscaler.io/run-seconds"  # on pods: how long work takes on simulated kubelets
CHECKPOINTED_AT = f"{PREFIX}/checkpointed-at"  # on pods: RFC 3339 time of the last checkpoint; empty: none yet
# On pods: RFC 3339 time at which it was announced that their workload ends, since its GPUs are idle.
IDLE_ANNOUNCED_AT = f"{PREFIX}/idle-announced-at"
IDLE_ENDS_AT = f"{PREFIX}/idle-ends-at"  # on pods: RFC 3339 time at which it ends if it stays idle
IDLE_ALLOWED = f"{PREFIX}/idle-allowed"  # on pods: "true" keeps their workload, however idle its GPUs are
# On namespaces: "true" ends their workloads with GPUs that are idle, as `idle_jobs.namespaces` of the policy does.
END_IDLE_WORKLOADS = f"{PREFIX}/end-idle-workloads"
EXPECTED_END = f"{PREFIX}/expected-end"  # on pods: RFC 3339 time at which their work is expected to end
# On nodes, to test an interruption: only with the policy's `spot.is_test_annotation_on`.
SPOT_INTERRUPTION_WARNING = f"{PREFIX}/spot-interruption-warning"  # "true"
SPOT_TERMINATION_TIME = f"{PREFIX}/spot-termination-time"  # RFC 3339; without it two minutes
TERMINATION_FINALIZER = f"{PREFIX}/termination"
# Taint `PreferNoSchedule` of nodes that are to become empty: new pods go elsewhere where they can.
AVOID_TAINT = f"{PREFIX}/avoid"

# Keys of other projects that we honor.
KARPENTER_DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
# On Karpenter's nodes, until it has registered them and from then on (Karpenter,
# `pkg/apis/v1/labels.go` and `taints.go`, v1.12.1; read 2026-11-22).
KARPENTER_UNREGISTERED_TAINT = "karpenter.sh/unregistered"
KARPENTER_REGISTERED = "karpenter.sh/registered"
# On nodes that load balancers must exclude, whatever its value (Kubernetes, "Well-Known Labels,
# Annotations and Taints"; read 2026-11-22). The value marks the ones that we set.
EXCLUDE_FROM_BALANCERS = "node.kubernetes.io/exclude-from-external-load-balancers"
EXCLUDED_BY_US = "gpu-autoscaler"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
# Names of local volumes, separated by commas, whose files may be lost.
SAFE_TO_EVICT_VOLUMES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
SCALE_DOWN_DISABLED = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # on pods of a JobSet (JobSet 0.8, `api/jobset/v1alpha2`)
# Pods that start together: the name of their group, by label or annotation. Sources: Kubernetes SIG Scheduling,
# "Coscheduling" (the label of the CRD, and those that came before it); Kueue, "Run Plain Pods"; Volcano, "PodGroup"
# (read 2026-11-21).
POD_GROUP_LABELS = (
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
    "pod-group.scheduling.sigs.k8s.io/name",
    "kueue.x-k8s.io/pod-group-name",
)
POD_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
# Total pods of the group (Kueue), or the pods that start together (Coscheduling before its CRD); on each pod.
POD_GROUP_TOTAL_COUNT = "kueue.x-k8s.io/pod-group-total-count"
POD_GROUP_MIN_AVAILABLE = ("pod-group.scheduling.sigs.k8s.io/min-available", "scheduling.x-k8s.io/min-available")
# On pods of a gang: the node label whose value all of them must share, an NVLink domain, rack or zone. Ours and Kueue's
# (Kueue, "Topology Aware Scheduling"; read 2026-11-21).
GANG_WITHIN = (f"{PREFIX}/gang-within", "kueue.x-k8s.io/podset-required-topology")
# On pods: the ProvisioningRequest of their namespace whose capacity they use, and its class; with the keys that came
# before (kubernetes/autoscaler, cluster-autoscaler/provisioningrequest/pods; read 2026-11-27).
CONSUME_PROVISIONING_REQUEST = (
    "autoscaling.x-k8s.io/consume-provisioning-request",
    "cluster-autoscaler.kubernetes.io/consume-provisioning-request",
)
PROVISIONING_CLASS = (
    "autoscaling.x-k8s.io/provisioning-class-name",
    "cluster-autoscaler.kubernetes.io/provisioning-class-name",
)
START_BY = (
    f"{PREFIX}/start-by"  # on pods: RFC 3339 instant by which they are to start; of equal priority the earliest first
)
# On the namespace kube-system: RFC 3339 instant at which etcd was restored from a backup, set by an operator. Versions
# of objects begin again there, so what was seen before it is older than all that is seen after.
RESTORED_AT = f"{PREFIX}/restored-at"
# Volcano generates groups with a minimum of one for pods that name none: these are not gangs.
POD_GROUP_GENERATED_PREFIX = "podgroup-"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
HOSTNAME = "kubernetes.io/hostname"
GPU_PRODUCT = "nvidia.com/gpu.product"
# How the GPU operator shares a node's GPUs (NVIDIA GPU operator, "MIG Support", "Time-Slicing GPUs"; read 2026-11-21).
MIG_CONFIG = "nvidia.com/mig.config"
DEVICE_PLUGIN_CONFIG = "nvidia.com/device-plugin.config"


def workload_type_of(labels: Mapping[str, str]) -> str:
    """Return the workload type by the labels of a pod; empty without one."""
    return labels.get(WORKLOAD_TYPE) or labels.get(PLAIN_WORKLOAD_TYPE, "")
