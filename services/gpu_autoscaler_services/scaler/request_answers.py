"""Writes conditions of ProvisioningRequests, as a plan decided.

Each write carries the resource version that was read, so that the conditions of others are kept.
"""

import msgspec
import structlog

from gpu_autoscaler.kube.protocol import PROVISIONING_REQUESTS, KubeApi
from gpu_autoscaler.kube.wire.provisioning import RequestCondition
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest

MESSAGE_LENGTH_MAX = 4096  # Kubernetes allows eight times as much

log = structlog.get_logger()


class RequestAnswers:
    """Writes answers."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube

    async def write(self, decision: AnswerProvisioningRequest) -> None:
        """Write one condition, unless the request has it already, or another request has its name by now.

        Raises NotFound, Conflict, TransientError, PermanentError.
        """
        request = await self._kube.get(PROVISIONING_REQUESTS, decision.namespace, decision.name)
        conditions = {condition.type: condition for condition in request.status.conditions}
        known = conditions.get(decision.condition)
        answer = RequestCondition(
            type=decision.condition,
            status="True" if decision.is_true else "False",
            reason=decision.code,
            message=decision.reason.sentence()[:MESSAGE_LENGTH_MAX],
            observed_generation=request.metadata.generation,
            last_transition_time=decision.at.replace(microsecond=0),
        )
        if known is not None and known.status == answer.status:
            answer = msgspec.structs.replace(answer, last_transition_time=known.last_transition_time)
        is_written = known is not None and (known.status, known.reason) == (answer.status, answer.reason)
        if request.metadata.uid != decision.request_uid or is_written:
            return
        conditions[decision.condition] = answer
        written = [
            {field: value for field, value in msgspec.to_builtins(condition).items() if value is not None}
            for condition in conditions.values()
        ]
        patch = {
            "metadata": {"uid": request.metadata.uid, "resourceVersion": request.metadata.resource_version},
            "status": {"conditions": written},
        }
        await self._kube.change(PROVISIONING_REQUESTS, decision.namespace, decision.name, patch, subresource="status")
        log.info(
            "provisioning request answered",
            request=f"{decision.namespace}/{decision.name}",
            condition=decision.condition,
            status=answer.status,
            reason=decision.code,
        )
