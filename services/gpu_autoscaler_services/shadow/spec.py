"""The declaration of the shadow. It opens no executor, provider or Kubernetes client."""

from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.compute import ComputeThread
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.policy_reload import PolicyFile
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.shadow.service import REAL_PLAN_AGE_MAX, Digests, Shadow
from gpu_autoscaler_services.wiring import follow_policy, last_facts, open_bus, policy_file, resume_state


async def compose(context: ProcessContext) -> Composed:
    """Compose the service. Raises ConfigError without a shadow policy."""
    path = context.settings.policy.shadow_path
    if path is None:
        raise ConfigError("settings", ["policy.shadow_path: is missing; set it to the file of the shadow policy"])
    real, other = policy_file(context), PolicyFile(Path(path))
    digests = Digests(shadow=policy_digest(other.now), real=policy_digest(real.now), core=core_digest())
    bus = await open_bus(context, Shadow)
    # From a state before the real plans that are still to be compared.
    await resume_state(context, Shadow, bus, age_min=REAL_PLAN_AGE_MAX)
    own = await last_facts(context, bus, Shadow.remembers)
    context.view.advance(context.view.state, {last.stream: last.sequence for last in own})  # earlier ones count no more
    service = Shadow(context.view, real.now, other.now, digests)
    service.on_folded(own)
    service.compute = ComputeThread()
    await follow_policy(context, real, service.use_real)
    await follow_policy(context, other, service.use_shadow, condition="shadow policy")
    return service, bus


SPEC = ServiceSpec(
    service=Shadow,
    compose=compose,
    processes=(Process(name="shadow", uses=("snapshots", "policy"), condition="shadow_policy"),),
)
