"""The CustomResourceDefinition of `AutoscalingPolicy`, generated from its structs (`kube/wire/policy.py`).

`make schemas` writes it to `deploy/charts/gpu-autoscaler/crds`. Source: Kubernetes, "Extend the Kubernetes API with
CustomResourceDefinitions", sections structural schema, defaulting, validation rules, printer columns (read 2026-11-21).
"""

import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from gpu_autoscaler.contracts.schemas import Document, to_yaml
from gpu_autoscaler.kube.translate.policy_rules import RULES_OF_POLICY, RULES_OF_POOL, Rule
from gpu_autoscaler.kube.wire.policy import DEFINITION, GROUP, KIND, PLURAL, VERSION, PolicySpec, PolicyStatus

SHORT_NAME = "asp"

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
    spec_schema, status_schema = _structural(spec, components), _structural(status, components)
    pools = spec_schema["properties"]["nodePools"]
    _keyed(pools, "name")
    _keyed(status_schema["properties"]["conditions"], "type")
    spec_schema["x-kubernetes-validations"] = _rules(RULES_OF_POLICY)
    pools["items"]["x-kubernetes-validations"] = _rules(RULES_OF_POOL)
    return {
        "type": "object",
        "description": "Pools of GPU nodes and their scaling thresholds.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema,
            "status": status_schema,
        },
    }


def _keyed(items: Document, key: str) -> None:
    """Make the list a map: the server rejects duplicate keys, and apply merges item by item."""
    items |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _rules(rules: Iterable[Rule[Any]]) -> list[Document]:
    return [{"rule": rule.cel, "message": rule.message} for rule in rules]


def _structural(schema: Any, components: dict[str, Any]) -> Document:  # noqa: ANN401 - JSON Schema
    """Return the schema without references, nulls and titles. Optional fields are absent, never null."""
    if "$ref" in schema:
        named = components[schema["$ref"].rsplit("/", 1)[1]]
        return _structural({**named, **{key: value for key, value in schema.items() if key != "$ref"}}, components)
    if "anyOf" in schema:
        (variant,) = (option for option in schema["anyOf"] if option.get("type") != "null")
        return _structural({**{key: value for key, value in schema.items() if key != "anyOf"}, **variant}, components)
    plain: Document = {}
    for key, value in schema.items():
        if key == "title" or (key == "default" and value is None):
            continue
        if key == "properties":
            plain[key] = {name: _structural(field, components) for name, field in value.items()}
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
