"""ProvisioningRequests, the PodTemplates that they name, and the PriorityClasses of these.

Source: kubernetes/autoscaler, cluster-autoscaler/apis (autoscaling.x-k8s.io/v1beta1), and the Kubernetes API reference,
"PodTemplate" (read 2026-11-27) and "PriorityClass" (read 2026-11-28). The tests apply the definition of requests to a
real API server.
"""

from collections.abc import Mapping

from gpu_autoscaler.kube.wire.core import Condition, Metadata, Object, PodSpec, Wire


class PodTemplateSpec(Wire, frozen=True, kw_only=True):
    """The pods of a template."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


class PodTemplate(Object, frozen=True, kw_only=True):
    """A PodTemplate."""

    template: PodTemplateSpec = PodTemplateSpec()


class PriorityClass(Object, frozen=True, kw_only=True):
    """A PriorityClass."""

    value: int = 0
    global_default: bool = False  # for pods that name none


class Reference(Wire, frozen=True, kw_only=True):
    """The name of an object in the same namespace."""

    name: str = ""


class RequestedPods(Wire, frozen=True, kw_only=True):
    """A number of pods of one template."""

    pod_template_ref: Reference = Reference()
    count: int = 1


class ProvisioningRequestSpec(Wire, frozen=True, kw_only=True):
    """The spec of a ProvisioningRequest, which never changes."""

    pod_sets: tuple[RequestedPods, ...] = ()
    provisioning_class_name: str = ""
    parameters: Mapping[str, str] = {}


class RequestCondition(Condition, frozen=True, kw_only=True):
    """A condition, as it is written back."""

    observed_generation: int | None = None


class ProvisioningRequestStatus(Wire, frozen=True, kw_only=True):
    """The status of a ProvisioningRequest; of its details none is read."""

    conditions: tuple[RequestCondition, ...] = ()


class ProvisioningRequest(Object, frozen=True, kw_only=True):
    """A ProvisioningRequest."""

    spec: ProvisioningRequestSpec = ProvisioningRequestSpec()
    status: ProvisioningRequestStatus = ProvisioningRequestStatus()
