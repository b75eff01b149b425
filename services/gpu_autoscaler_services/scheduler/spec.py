"""The declaration of the scheduler."""

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.runtime.process import ProcessContext
from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import Scheduler
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, JOB_KINDS, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import (
    follow_policy,
    open_bus,
    open_hooks,
    open_kube,
    open_process_store,
    policy_file,
    resumed_snapshots,
)


async def compose(context: ProcessContext) -> tuple[Service, Bus]:
    """Compose the service."""
    policies = policy_file(context)
    kube, _ = await open_kube(context)
    binder = Binder(kube, context.settings.kube.namespace, open_hooks(context))
    bus, store = await open_bus(context, Scheduler), await open_process_store(context)
    snapshots = await resumed_snapshots(context, Scheduler, store, bus)
    service = Scheduler(context.view, policies.now, store, binder, context.clock.now, snapshots.lost_state)
    await follow_policy(context, policies, service.use_policy)
    return service, bus


SPEC = ServiceSpec(
    service=Scheduler,
    compose=compose,
    processes=(Process(name="scheduler", uses=("store", "policy", "kube")),),
    rights=(
        CLUSTER_IDENTITY,
        *(
            Right(verbs=("create", "get", "patch", "delete"), resource=resource, group=group, is_for_jobs=True)
            for resource, group in (("jobs", "batch"), *JOB_KINDS)
        ),
        Right(verbs=("create",), resource="services", is_for_jobs=True),  # the names of a gang's members
        Right(verbs=("list",), resource="pods"),  # of a node, in all namespaces
        Right(verbs=("patch",), resource="pods", is_for_jobs=True),  # checkpoint requests
    ),
)
