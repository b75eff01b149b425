"""The declaration of the scaler."""

from gpu_autoscaler.kube.leases import LeaseMirror, mirroring
from gpu_autoscaler.runtime.compute import ComputeThread
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.lease import Lease
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler.runtime.runner import instance_name
from gpu_autoscaler.runtime.snapshots import saving_periodically
from gpu_autoscaler_services import wiring
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.executor import Executor
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.idle_workloads import IdleWorkloads
from gpu_autoscaler_services.scaler.inventory import InstanceWatch
from gpu_autoscaler_services.scaler.node_taints import NodeTaints
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.request_answers import RequestAnswers
from gpu_autoscaler_services.scaler.service import Digests, Scaler
from gpu_autoscaler_services.scaler.upkeep import UpkeepSteps
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec


async def compose(context: ProcessContext) -> Composed:
    """Compose the service. It folds the whole state, so it is the one that saves snapshots."""
    policies = wiring.policy_file(context)
    bus, store = await wiring.open_bus(context, Scaler), await wiring.open_process_store(context)
    lease = Lease(bus, Scaler.name, instance_name(context.settings.instance), context.clock.monotonic_seconds)
    kube, _ = await wiring.open_kube(context, before_write=lease.require)
    if context.settings.kube.is_lease_mirrored:
        shown = LeaseMirror(kube, context.settings.kube.namespace, f"gpu-autoscaler-{Scaler.name}")
        await context.closing.enter_async_context(mirroring(shown, lease, context.clock.now))
    provider, installation = await wiring.open_provider_of(context)
    snapshots = await wiring.resumed_snapshots(context, Scaler, store, bus)
    await context.closing.enter_async_context(saving_periodically(snapshots, context.settings.store.snapshot_seconds))
    hooks = wiring.open_hooks(context)
    executor = Executor(
        Purchases(context.view, provider, installation, context.clock.now),
        Drains(context.view, kube, context.clock, hooks),
        store,
        UpkeepSteps(
            Finalizers(kube),
            NodeTaints(kube),
            CheckpointNotices(kube, hooks),
            OrphanedNodes(kube, provider),
            RequestAnswers(kube),
            IdleWorkloads(kube),
            context.clock.now,
        ),
    )
    service = Scaler(
        context.view,
        policies.now,
        executor,
        DecisionRecovery(store, policies.now, snapshots.lost_state),
        InstanceWatch(provider, installation, context.clock),
        digests=Digests(policy=policy_digest(policies.now), core=core_digest()),
        metrics=context.metrics,
        lease=lease,
    )
    service.compute = ComputeThread()
    await wiring.follow_policy(context, policies, lambda policy: service.use_policy(policy, str(policies.path)))
    return service, bus


SPEC = ServiceSpec(
    service=Scaler,
    compose=compose,
    processes=(
        Process(name="scaler", chart_name="controller", uses=("store", "policy", "kube", "cloud"), chart_replicas=3),
    ),
    rights=(
        CLUSTER_IDENTITY,
        # delete: orphaned nodes, where no cloud controller removes them.
        Right(verbs=("get", "list", "patch", "delete"), resource="nodes"),
        Right(verbs=("list",), resource="volumeattachments", group="storage.k8s.io"),
        Right(verbs=("get", "list", "patch", "delete"), resource="pods"),
        Right(verbs=("create",), resource="pods/eviction"),
        Right(verbs=("patch",), resource="pods/status"),  # the disruption condition of pods deleted at a deadline
        # Idle workloads of opted-in namespaces, ended through their owner.
        Right(verbs=("get", "patch"), resource="deployments", group="apps"),
        Right(verbs=("get", "patch"), resource="replicasets", group="apps"),
        Right(verbs=("get", "patch"), resource="statefulsets", group="apps"),
        Right(verbs=("get", "delete"), resource="jobs", group="batch"),
        Right(verbs=("get", "delete"), resource="jobsets", group="jobset.x-k8s.io"),
        # The mirrored leader lease, where it is enabled.
        Right(verbs=("create", "get", "patch"), resource="leases", group="coordination.k8s.io", is_for_jobs=True),
    ),
    # The chart adds the right to get the node class that its values name.
    rights_with_karpenter=(
        Right(verbs=("create", "get", "list", "patch", "delete"), resource="nodeclaims", group="karpenter.sh"),
        Right(verbs=("list",), resource="events"),  # why a NodeClaim was not launched
    ),
    rights_with_limits=(Right(verbs=("get", "patch"), resource="nodepools", group="karpenter.sh"),),
    rights_with_provisioning=(
        Right(verbs=("get",), resource="provisioningrequests", group="autoscaling.x-k8s.io"),
        Right(verbs=("patch",), resource="provisioningrequests/status", group="autoscaling.x-k8s.io"),
    ),
    has_lease=True,
)
