"""The declaration of the scheduler."""

from functools import partial

from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services import wiring
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.recovery import ends_of
from gpu_autoscaler_services.scheduler.service import MeasuringScheduler, scheduler_for
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, JOB_KINDS, Process, Right, ServiceSpec


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    policies = wiring.policy_file(context)
    kind = scheduler_for(policies.now)
    kube, _ = await wiring.open_kube(context)
    binder = Binder(kube, context.settings.kube.namespace, wiring.open_hooks(context))
    bus, store = await wiring.open_bus(context, kind), await wiring.open_process_store(context)
    snapshots = await wiring.resumed_snapshots(context, kind, store, bus)
    service = kind(
        context.view,
        policies.now,
        store,
        binder,
        context.clock.now,
        snapshots.lost_state,
        ends=partial(ends_of, bus, context.clock),
    )
    await wiring.follow_policy(context, policies, service.use_policy)
    return service, bus


SPEC = ServiceSpec(
    service=MeasuringScheduler,
    compose=compose,
    processes=(Process(name="scheduler", uses=("store", "policy", "kube")),),
    rights=(
        CLUSTER_IDENTITY,
        *(
            Right(verbs=("create", "get", "patch", "delete"), resource=resource, group=group, is_for_jobs=True)
            for resource, group in (("jobs", "batch"), *JOB_KINDS)
        ),
        Right(verbs=("create",), resource="services", is_for_jobs=True),  # the names of a gang's members
        # The volumes of pod templates: which nodes reach them.
        Right(verbs=("get",), resource="persistentvolumeclaims", is_for_jobs=True),
        Right(verbs=("get",), resource="persistentvolumes"),
        Right(verbs=("get",), resource="storageclasses", group="storage.k8s.io"),
        Right(verbs=("list",), resource="pods"),  # of a node, in all namespaces
        Right(verbs=("patch",), resource="pods", is_for_jobs=True),  # checkpoint requests
    ),
    rights_with_namespaces=(
        Right(verbs=("create", "get"), resource="namespaces"),
        Right(verbs=("create", "get", "patch"), resource="resourcequotas"),
        Right(verbs=("create",), resource="serviceaccounts"),
        Right(verbs=("create",), resource="networkpolicies", group="networking.k8s.io"),
    ),
)
