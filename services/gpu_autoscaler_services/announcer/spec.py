"""The declaration of the announcer."""

from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.announcer.service import Announcer
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import follow_policy, last_facts, open_bus, open_kube, policy_file, resume_state


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    policies = policy_file(context)
    kube, _ = await open_kube(context)
    bus = await open_bus(context, Announcer)
    await resume_state(context, Announcer, bus)
    service = Announcer(context.view, policies.now, EventRecorder(kube))
    service.on_folded(await last_facts(context, bus, Announcer.remembers))
    await follow_policy(context, policies, service.use_policy)
    return service, bus


SPEC = ServiceSpec(
    service=Announcer,
    compose=compose,
    processes=(Process(name="announcer", uses=("snapshots", "policy", "kube"), condition="real_cluster"),),
    rights=(CLUSTER_IDENTITY, Right(verbs=("create", "get", "patch"), resource="events")),
)
