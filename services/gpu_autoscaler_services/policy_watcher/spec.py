"""The declaration of the policy watcher."""

from gpu_autoscaler.kube.event_recorder import EventRecorder
from gpu_autoscaler.kube.wire.policy import DEFINITION, GROUP, PLURAL
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.policy_watcher.service import PolicyWatcher
from gpu_autoscaler_services.service_spec import CLUSTER_IDENTITY, LIST_WATCH, Process, Right, ServiceSpec
from gpu_autoscaler_services.wiring import follow_policy, open_bus, open_kube, policy_file, resume_state


async def compose(context: ProcessContext) -> Composed:
    """Compose the service."""
    policies = policy_file(context)
    kube, _ = await open_kube(context)
    bus = await open_bus(context, PolicyWatcher)
    await resume_state(context, PolicyWatcher, bus)
    service = PolicyWatcher(
        context.view,
        policies.now,
        kube,
        EventRecorder(kube),
        provider=context.settings.provider.name,
        report=lambda text: context.readiness.note("policies", text),
    )
    await follow_policy(context, policies, service.use_policy)
    return service, bus


SPEC = ServiceSpec(
    service=PolicyWatcher,
    compose=compose,
    processes=(Process(name="policy-watcher", uses=("snapshots", "policy", "kube"), condition="real_cluster"),),
    rights=(
        CLUSTER_IDENTITY,
        Right(verbs=LIST_WATCH, resource=PLURAL, group=GROUP),
        Right(verbs=("patch",), resource=f"{PLURAL}/status", group=GROUP),
        Right(verbs=("get",), resource="customresourcedefinitions", group="apiextensions.k8s.io", name=DEFINITION),
        Right(verbs=("create", "get", "patch"), resource="events"),
    ),
)
