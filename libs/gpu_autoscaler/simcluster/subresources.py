"""Eviction and binding, the pod subresources with rules.

Source: `pkg/registry/core/pod/storage/{eviction,storage}.go` of Kubernetes 1.36 (read 2026-11-21) and recorded
answers. An eviction refused by a PodDisruptionBudget has no Retry-After.
"""

from gpu_autoscaler.simcluster import answers
from gpu_autoscaler.simcluster.api import Api, DeleteOptions
from gpu_autoscaler.simcluster.kinds import BUDGETS, NODES, PODS, Kind
from gpu_autoscaler.simcluster.objects import (
    Json,
    is_finished,
    is_terminating,
    is_true,
    labels_of,
    mark_disrupted,
    phase_of,
    set_pod_condition,
)
from gpu_autoscaler.simcluster.selectors import selector_matches
from gpu_autoscaler.simcluster.shapes import BindingBody, DeleteBody, EvictionBody, Preconditions, read_as

ZONE_LABELS = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")
_BINDING = Kind(group="", kind="Binding", plural="pods/binding")
_TWO_BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
_REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."


def evict(api: Api, key: str, body: object) -> Json:
    """Begin the pod's deletion if its budget allows. Raises ApiRefusal 400, 404, 409, 429, 500."""
    eviction = read_as(body, EvictionBody, "policy/v1 Eviction")
    pod = api.record(PODS, key).object
    name = pod["metadata"]["name"]
    given = (eviction.metadata and eviction.metadata.name) or name
    if given != name or eviction.kind not in (None, "Eviction"):
        raise answers.bad_request(f"name in URL does not match name in Eviction object: {name} != {given}")
    options = delete_options(eviction.delete_options or DeleteBody())
    if options.uid and options.uid != pod["metadata"]["uid"]:
        raise answers.other_uid(PODS, name, options.uid, pod["metadata"]["uid"])
    if not is_finished(pod) and not is_terminating(pod) and phase_of(pod) != "Pending":
        _spend_budget(api, pod)
    if not is_terminating(pod):
        api.modify(
            PODS, key, lambda new: mark_disrupted(new, api.now(), "EvictionByEvictionAPI", "Eviction API: evicting")
        )
    api.delete(PODS, key, options)
    return answers.success(201)


def _spend_budget(api: Api, pod: Json) -> None:
    """Take one disruption from the pod's PodDisruptionBudget. Raises ApiRefusal 429 or 500."""
    budgets = [
        budget
        for budget in api.objects(BUDGETS, pod["metadata"]["namespace"])
        if selector_matches(budget.get("spec", {}).get("selector"), labels_of(pod))
    ]
    if not budgets:
        return
    if len(budgets) > 1:
        raise answers.failure(500, "", _TWO_BUDGETS)
    budget = budgets[0]
    name = budget["metadata"]["name"]
    status = dict.fromkeys(("currentHealthy", "desiredHealthy", "disruptionsAllowed"), 0) | budget.get("status", {})
    if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        why = f"The disruption budget {name} is still being processed by the server."
        raise _over_budget(why, retry_after_seconds=10)
    unready_may_go = budget["spec"].get("unhealthyPodEvictionPolicy", "IfHealthyBudget")
    if not is_true(pod, "Ready") and (
        unready_may_go == "AlwaysAllow" or status["currentHealthy"] >= status["desiredHealthy"] > 0
    ):
        return
    if status["disruptionsAllowed"] < 1:
        needs, has = status["desiredHealthy"], status["currentHealthy"]
        raise _over_budget(f"The disruption budget {name} needs {needs} healthy pods and has {has} currently")

    def spend(new: Json) -> None:
        new["status"]["disruptionsAllowed"] -= 1

    api.modify(BUDGETS, f"{budget['metadata']['namespace']}/{name}", spend)


def _over_budget(why: str, *, retry_after_seconds: int | None = None) -> answers.ApiRefusal:
    details: Json = {"causes": [{"reason": "DisruptionBudget", "message": why}]}
    if retry_after_seconds:
        details["retryAfterSeconds"] = retry_after_seconds
    return answers.failure(429, "TooManyRequests", _REFUSED, details, retry_after_seconds=retry_after_seconds)


def bind(api: Api, key: str, body: object) -> Json:
    """Assign the pod to a node, as a scheduler does. Raises ApiRefusal 400, 404, 409, and 500 without a node."""
    binding = read_as(body, BindingBody, "v1 Binding")
    pod = api.record(PODS, key).object
    name = pod["metadata"]["name"]
    if binding.metadata and binding.metadata.name not in (None, "", name):
        raise answers.bad_request("name in URL does not match name in Binding object")
    target = binding.target
    if target is not None and target.kind not in (None, "", "Node"):
        known = 'supported values: "Node", "<empty>"'
        raise answers.failure(500, "", f'target.kind: Unsupported value: "{target.kind}": {known}')
    if target is None or not target.name:
        raise answers.failure(500, "", "target.name: Required value")
    if is_terminating(pod):
        raise answers.conflict(_BINDING, name, f"pod {name} is being deleted, cannot be assigned to a host")
    if pod["spec"].get("nodeName"):
        why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        raise answers.conflict(_BINDING, name, why)
    if pod["spec"].get("schedulingGates"):
        raise answers.conflict(_BINDING, name, f"pod {name} has non-empty .spec.schedulingGates")
    assign(api, key, target.name)
    return answers.success(201)


def assign(api: Api, key: str, node_name: str) -> None:
    """Write the binding: node, the node's zone and region as labels, and the condition."""
    node = api.find(NODES, node_name)

    def write(pod: Json) -> None:
        pod["spec"]["nodeName"] = node_name
        if node:
            topology = {label: labels_of(node)[label] for label in ZONE_LABELS if label in labels_of(node)}
            pod["metadata"]["labels"] = {**labels_of(pod), **topology}
        set_pod_condition(pod, api.now(), "PodScheduled", status="True")

    api.modify(PODS, key, write)


def delete_options(body: DeleteBody) -> DeleteOptions:
    """Return the options in the API's form."""
    preconditions = body.preconditions or Preconditions()
    return DeleteOptions(
        grace_seconds=body.grace_period_seconds,
        uid=preconditions.uid,
        version=preconditions.resource_version,
        propagation=body.propagation_policy,
    )
