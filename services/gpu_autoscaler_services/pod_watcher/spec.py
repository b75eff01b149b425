"""The declaration of the pod watcher."""

from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, JOB_KINDS, LIST_WATCH, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import open_bus, open_kube

_DEVICES = ("resourceclaims", "resourceclaimtemplates", "resourceslices", "deviceclasses")


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    kube, cluster = await open_kube(context)
    settings = context.settings.kube
    watcher = PodWatcher(
        kube,
        cluster,
        are_quotas_watched=settings.are_quotas_watched,
        are_provisioning_requests_served=settings.are_provisioning_requests_served,
        are_namespaces_watched=True,
    )
    return watcher, await open_bus(context, PodWatcher)


SPEC = ServiceSpec(
    service=PodWatcher,
    compose=compose,
    processes=(Process(name="pod-watcher", uses=("kube",), is_observer=True),),
    rights=(
        CLUSTER_IDENTITY,
        Right(verbs=LIST_WATCH, resource="pods"),
        Right(verbs=LIST_WATCH, resource="nodes"),
        Right(verbs=LIST_WATCH, resource="namespaces"),  # those that opt in to the end of idle workloads
        Right(verbs=LIST_WATCH, resource="persistentvolumeclaims"),
        Right(verbs=LIST_WATCH, resource="persistentvolumes"),
        Right(verbs=LIST_WATCH, resource="storageclasses", group="storage.k8s.io"),
        Right(verbs=LIST_WATCH, resource="poddisruptionbudgets", group="policy"),
        Right(verbs=LIST_WATCH, resource="jobs", group="batch"),
        *(Right(verbs=LIST_WATCH, resource=resource, group=group) for resource, group in JOB_KINDS),
        *(Right(verbs=LIST_WATCH, resource=resource, group="resource.k8s.io") for resource in _DEVICES),
        Right(verbs=LIST_WATCH, resource="podgroups", group="scheduling.x-k8s.io"),
        Right(verbs=LIST_WATCH, resource="podgroups", group="scheduling.volcano.sh"),
    ),
    rights_with_quotas=(Right(verbs=LIST_WATCH, resource="resourcequotas"),),
    rights_with_provisioning=(
        Right(verbs=LIST_WATCH, resource="podtemplates"),
        Right(verbs=LIST_WATCH, resource="priorityclasses", group="scheduling.k8s.io"),
        Right(verbs=LIST_WATCH, resource="provisioningrequests", group="autoscaling.x-k8s.io"),
    ),
)
