"""The declaration of the announcer."""

from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.announcer.service import Announcer
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import follow_policy, open_bus, open_kube, policy_file


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    policies = policy_file(context)
    kube, _ = await open_kube(context)
    service = Announcer(context.view, policies.now, EventRecorder(kube))
    await follow_policy(context, policies, service.use_policy)
    return service, await open_bus(context, Announcer)


SPEC = ServiceSpec(
    service=Announcer,
    compose=compose,
    processes=(Process(name="announcer", uses=("policy", "kube"), condition="real_cluster"),),
    rights=(CLUSTER_IDENTITY, Right(verbs=("create", "get", "patch"), resource="events")),
)
