"""The CustomResourceDefinition of `AutoscalingPolicy`, written from its structs (`kube/wire/policy.py`).

Called by `make schemas` for `deploy/charts/gpu-autoscaler/crds`. Source: Kubernetes, "Extend the Kubernetes API with
CustomResourceDefinitions", sections structural schema, defaulting, validation rules, printer columns (read 2026-11-21).
"""

import sys
from typing import Any

import msgspec

from gpu_autoscaler.contracts.schemas import Document, to_yaml
from gpu_autoscaler.kube.wire.policy import DEFINITION, GROUP, KIND, PLURAL, VERSION, PolicySpec, PolicyStatus

SHORT_NAME = "asp"

# What no range can say. The cost of a rule is bounded by the lengths that the structs give.
RULES_OF_POLICY = (
    (
        "!has(self.maxNodes) || self.minNodes <= self.maxNodes",
        "minNodes is above maxNodes; lower it, or raise maxNodes",
    ),
    (
        (
            "!has(self.scaleUpThreshold) || !has(self.scaleDownThreshold)"
            " || self.scaleDownThreshold < self.scaleUpThreshold"
        ),
        "scaleDownThreshold is not below scaleUpThreshold: what is bought would go at once",
    ),
    (
        "!has(self.maxNodes) || self.nodePools.map(pool, pool.minSize).sum() <= self.maxNodes",
        "the minSize of all pools add up to more than maxNodes; lower one of them, or raise maxNodes",
    ),
    (
        "self.enableSpotInstances || self.nodePools.all(pool, pool.capacityType != 'spot')",
        "a pool wants spot while enableSpotInstances is off; switch it on, or give the pool another capacityType",
    ),
    (
        "self.enableSpotInstances || !has(self.spotInstancePercentage) || self.spotInstancePercentage == 0",
        "spotInstancePercentage wants spot while enableSpotInstances is off",
    ),
)
RULES_OF_POOL = (
    ("!has(self.maxSize) || self.minSize <= self.maxSize", "minSize is above maxSize; lower it, or raise maxSize"),
    ("!has(self.maxSize) || self.maxSize > 0", "a maxSize of 0 lets nothing in; take the pool away"),
    (
        "!has(self.spotPercentage) || self.capacityType == 'mixed'",
        "spotPercentage is for pools of capacityType mixed",
    ),
    (
        "self.labels.all(key, !key.startsWith('gpu-autoscaler.io/'))",
        "labels of gpu-autoscaler.io/ are written by the autoscaler itself; take them away",
    ),
)
COLUMNS = (
    ("Provider", "string", ".spec.provider", 0),
    ("Nodes", "integer", ".status.nodes", 0),
    ("Desired", "integer", ".status.nodesDesired", 0),
    ("Pending", "integer", ".status.nodesPending", 0),
    ("Spot%", "integer", ".status.spotPercentage", 0),
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Max", "integer", ".spec.maxNodes", 1),
    ("GPUs", "integer", ".status.gpus", 1),
    ("USD/h", "string", ".status.priceUsdPerHour", 1),
    ("Today", "string", ".status.spentTodayUsd", 1),
    ("Reason", "string", ".status.conditions[?(@.type=='Ready')].reason", 1),
)


def policy_crd() -> Document:
    """Return the definition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["gpu-autoscaler"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if is_wide else {})}
                        for name, kind, path, is_wide in COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": _schema()},
                }
            ],
        },
    }


def _schema() -> Document:
    (spec, status), components = msgspec.json.schema_components(
        [PolicySpec, PolicyStatus], ref_template="#/$defs/{name}"
    )
    of_spec, of_status = _structural(spec, components), _structural(status, components)
    pools = of_spec["properties"]["nodePools"]
    _keyed(pools, "name")
    _keyed(of_status["properties"]["conditions"], "type")
    of_spec["x-kubernetes-validations"] = _rules(RULES_OF_POLICY)
    pools["items"]["x-kubernetes-validations"] = _rules(RULES_OF_POOL)
    return {
        "type": "object",
        "description": "Pools of GPU nodes and the thresholds of their scaling.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": of_spec,
            "status": of_status,
        },
    }


def _keyed(items: Document, key: str) -> None:
    """Two items of one key are refused by the server, and an apply merges item by item."""
    items |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _rules(rules: tuple[tuple[str, str], ...]) -> list[Document]:
    return [{"rule": rule, "message": message} for rule, message in rules]


def _structural(schema: Any, components: dict[str, Any]) -> Document:  # noqa: ANN401 - JSON Schema
    """The same without references, nulls and titles. What is left out is not there; it is never null."""
    if "$ref" in schema:
        named = components[schema["$ref"].rsplit("/", 1)[1]]
        return _structural({**named, **{key: value for key, value in schema.items() if key != "$ref"}}, components)
    if "anyOf" in schema:
        (variant,) = (each for each in schema["anyOf"] if each.get("type") != "null")
        return _structural({**{key: value for key, value in schema.items() if key != "anyOf"}, **variant}, components)
    plain: Document = {}
    for key, value in schema.items():
        if key == "title" or (key == "default" and value is None):
            continue
        if key == "properties":
            plain[key] = {name: _structural(each, components) for name, each in value.items()}
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            plain[key] = _structural(value, components)
        elif key != "additionalProperties":
            plain[key] = value
    if "enum" in plain:
        plain["type"] = "string"
        plain["enum"] = sorted(plain["enum"])
    return plain


if __name__ == "__main__":
    sys.stdout.write(to_yaml(policy_crd()))
