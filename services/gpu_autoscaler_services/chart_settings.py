"""Settings and policy keys in the values of the Helm chart: their schema, and settings that the chart sets itself."""

import json
from typing import Any

import msgspec

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.runtime.config import Settings

_MARK = '    "generated": {"$comment": "All following definitions are written by `make schemas`."}'
_LINE_CHARACTERS_MAX = 140
_OWN_BROKER = "pods log in as their broker user; see nats.external, nats.authCallout and nats.tls"
_POD = "the chart sets it for each pod"
_CLUSTER = "pods use the API of their cluster with their service account"

# Settings that `settings` of the values refuses, each with the next step. All others can be set there.
REFUSED_SETTINGS = {
    "nats.url": _OWN_BROKER,
    "nats.token_path": _OWN_BROKER,
    "nats.issuer_seed_path": _OWN_BROKER,
    "nats.node_account": _OWN_BROKER,
    "nats.replicas_count": "set nats.replicas or nats.external.replicas",
    "nats.stream_limits": "set nats.streamLimits",
    "nats.tls_ca_path": "set nats.tls.secretName",
    "nats.tls_certificate_path": "set nats.tls.clientSecretName",
    "nats.tls_key_path": "set nats.tls.clientSecretName",
    "nats.tls_server_name": "set nats.tls.serverName",
    "kube.url": _CLUSTER,
    "kube.token": _CLUSTER,
    "kube.kubeconfig_path": _CLUSTER,
    "kube.context": _CLUSTER,
    "kube.is_in_cluster": _CLUSTER,
    "kube.namespace": "set jobs.namespace",
    "kube.are_quotas_watched": "set jobs.watchQuotas",
    "kube.are_provisioning_requests_served": "set jobs.serveProvisioningRequests",
    "kube.is_lease_mirrored": "set leaderLease.enabled",
    "provider.name": "set autoscaling.provider",
    "provider.token": "values are no place for secrets; set defaults.extraEnv with a secretKeyRef",
    "aws.region": "set autoscaling.aws.region",
    "aws.launch_template": "set autoscaling.aws.launchTemplate",
    "aws.subnets": "set autoscaling.aws.subnets",
    "aws.instance_types": "set autoscaling.aws.instanceTypes",
    "aws.groups": "set autoscaling.aws.autoScalingGroups",
    "aws.desired_capacity_groups": "set autoscaling.aws.desiredCapacityGroups",
    "aws.shared_groups": "set autoscaling.aws.sharedAutoScalingGroups",
    "aws.capacity_reservations": "set autoscaling.aws.capacityReservations",
    "aws.placement_groups": "set autoscaling.aws.placementGroups",
    "aws.spot_ceilings": "set autoscaling.aws.spotCeilings",
    "aws.spot_advisor_path": "set autoscaling.aws.spotAdvisor",
    "aws.placement_score_count": "set autoscaling.aws.placementScoreCount",
    "aws.queue_url": "set autoscaling.aws.queueUrl",
    "aws.user_data_path": "set autoscaling.aws.userData",
    "aws.prices_path": "set autoscaling.aws.prices",
    "azure.subscription": "set autoscaling.azure.subscriptionID",
    "azure.resource_group": "set autoscaling.azure.resourceGroup",
    "azure.region": "set autoscaling.azure.region",
    "azure.scale_set": "set autoscaling.azure.flexibleScaleSet",
    "azure.machine_path": "set autoscaling.azure.machine",
    "azure.instance_types": "set autoscaling.azure.instanceTypes",
    "azure.scale_sets": "set autoscaling.azure.vmScaleSets",
    "azure.spot_ceilings": "set autoscaling.azure.spotCeilings",
    "azure.user_data_path": "set autoscaling.azure.userData",
    "azure.prices_path": "set autoscaling.azure.prices",
    "gcp.project": "set autoscaling.gcp.projectID",
    "gcp.region": "set autoscaling.gcp.region",
    "gcp.groups": "set autoscaling.gcp.instanceGroups",
    "gcp.shared_groups": "set autoscaling.gcp.sharedInstanceGroups",
    "gcp.prices_path": "set autoscaling.gcp.prices",
    "karpenter.node_class": "set autoscaling.karpenter.nodeClass",
    "karpenter.offers_path": "set autoscaling.karpenter.offers",
    "karpenter.mode": "set autoscaling.karpenter.mode",
    "karpenter.node_pools": "set autoscaling.karpenter.nodePools",
    "store.url": "set store.postgresql or store.sqlite",
    "store.snapshot_seconds": "set store.snapshotSeconds",
    "store.span_days": "set store.spanDays",
    "store.ledger_days": "set store.ledgerDays",
    "store.plan_days": "set store.planDays",
    "store.job_days": "set store.jobDays",
    "store.snapshot_days": "set store.snapshotDays",
    "store.audit_days": "set store.auditDays",
    "store.request_days": "set store.requestDays",
    "gateway.host": _POD,
    "gateway.port": "set gateway.service.port, the port at which others reach it",
    "gateway.tokens": "set gateway.tokensSecret",
    "gateway.is_token_review_enabled": "set gateway.tokenReview",
    "gateway.are_pod_templates_allowed": "set jobs.namespace to a namespace of its own",
    "gateway.is_cluster_token_accepted": "set gateway.clusterTokens",
    "gateway.namespace": _POD,
    "gateway.project_namespaces": "set gateway.projectNamespaces",
    "gateway.is_single_right_accepted": "set gateway.singleRight",
    "gateway.role_prefix": _POD,
    "gateway.oidc_issuer": "set gateway.oidc.issuer",
    "gateway.oidc_audience": "set gateway.oidc.audience",
    "gateway.oidc_user_claim": "set gateway.oidc.userClaim",
    "gateway.oidc_user_prefix": "set gateway.oidc.userPrefix",
    "gateway.oidc_groups_claim": "set gateway.oidc.groupsClaim",
    "gateway.oidc_groups_prefix": "set gateway.oidc.groupsPrefix",
    "gateway.oidc_ca_path": "set gateway.oidc.caConfigMap",
    "gateway.tls_certificate_path": "set gateway.tls.secretName",
    "gateway.tls_key_path": "set gateway.tls.secretName",
    "http.host": _POD,
    "http.port": "set sensing.hostPort, of the pods that share the network of their node",
    "sensing.role": _POD,
    "sensing.node_name": _POD,
    "sensing.dcgm_url": "set sensing.dcgmUrl",
    "sensing.dcgm_scrape_seconds": "set sensing.scrapeSeconds",
    "policy.path": "set policy",
    "policy.shadow_path": "set policy.shadow",
    "log.level": "set defaults.logLevel or services.<name>.logLevel",
    "instance": _POD,
}


def values_schema(text: str) -> str:
    """Return the text of values.schema.json with the definitions after the mark as the code has them."""
    written, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError(f"values.schema.json: no line {_MARK.strip()}")
    definitions = (_formatted(schema, f"{json.dumps(name)}: ", 2) for name, schema in _definitions().items())
    return ",\n    ".join((written + mark, *definitions)) + "\n  }\n}\n"


def _definitions() -> dict[str, dict[str, Any]]:
    """Return the schemas of the settings and of the values under `policy`, and of each of their structs."""
    _, structs = msgspec.json.schema_components((Settings, ScalingPolicy), ref_template="#/definitions/{name}")
    definitions: dict[str, dict[str, Any]] = {name: _plain(schema) for name, schema in sorted(structs.items())}
    sections: dict[str, dict[str, Any]] = {"": definitions["Settings"]["properties"]}
    for section, schema in sections[""].items():
        if "$ref" in schema:
            sections[section] = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
    for section, properties in sections.items():
        for key, schema in properties.items():
            if schema.get("type") == "array":
                schema["items"] |= {"pattern": "^[^,]*$"}  # commas separate items in the environment
            if (step := REFUSED_SETTINGS.get(f"{section}.{key}" if section else key)) is not None:
                properties[key] = {"description": f"Refused: {step}."}
    # A whole file, or its keys.
    policy = definitions["ScalingPolicy"]
    policy["properties"] = {"text": {"type": "string"}, "shadow": {"type": "string"}} | policy["properties"]
    return definitions


def _plain(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the schema without titles, compound defaults and null: in values an unset key is left out."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    variants = [variant for variant in schema.get("anyOf", ()) if variant != {"type": "null"}]
    if len(variants) == 1:
        schema = {key: value for key, value in schema.items() if key != "anyOf"} | variants[0]
    plain = {key: _plain(value) for key, value in schema.items() if key != "title" and value != []}
    if not isinstance(plain.get("default"), bool | int | float | str):
        plain.pop("default", None)
    if isinstance(plain.get("description"), str):
        plain["description"] = " ".join(plain["description"].split())
    return plain


def _formatted(value: object, head: str, depth: int) -> str:
    """Return JSON, each object or list on one line where it fits."""
    line = head + json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict) or 2 * depth + len(line) < _LINE_CHARACTERS_MAX:
        return line
    indent = "  " * depth
    items = (_formatted(item, f"{json.dumps(name)}: ", depth + 1) for name, item in value.items())
    lines = ",\n".join(f"{indent}  {item}" for item in items)
    return f"{head}{{\n{lines}\n{indent}}}"
