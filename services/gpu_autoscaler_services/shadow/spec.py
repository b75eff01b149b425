"""The declaration of the shadow. It opens no executor, provider or Kubernetes client."""

from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.compute import ComputeThread
from gpu_autoscaler.runtime.digests import core_digest, policy_digest
from gpu_autoscaler.runtime.policy_reload import PolicyFile
from gpu_autoscaler.runtime.process import Composed, ProcessContext
from gpu_autoscaler_services.service_spec import Process, ServiceSpec
from gpu_autoscaler_services.shadow.service import Digests, Shadow
from gpu_autoscaler_services.wiring import follow_policy, open_bus, policy_file


async def compose(context: ProcessContext) -> Composed:
    """Compose the service. Raises ConfigError without a shadow policy."""
    path = context.settings.policy.shadow_path
    if path is None:
        raise ConfigError("settings", ["policy.shadow_path: is missing; set it to the file of the shadow policy"])
    real, other = policy_file(context), PolicyFile(Path(path))
    digests = Digests(shadow=policy_digest(other.now), real=policy_digest(real.now), core=core_digest())
    service = Shadow(context.view, real.now, other.now, digests)
    service.compute = ComputeThread()
    await follow_policy(context, real, service.use_real)
    await follow_policy(context, other, service.use_shadow, condition="shadow policy")
    return service, await open_bus(context, Shadow)


SPEC = ServiceSpec(
    service=Shadow, compose=compose, processes=(Process(name="shadow", uses=("policy",), condition="shadow_policy"),)
)
