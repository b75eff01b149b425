"""Schemas of a running API server for kubeconform: a file per kind, and all definitions.

kubeconform's own are published for Kubernetes' releases; these are of the very server that is asked.
"""

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# kubeconform's template of schema locations. Source: its README, "Overriding schemas location" (read 2026-11-21).
LOCATION = "{{ .ResourceKind }}-{{ .ResourceAPIVersion }}-{{ .Group }}.json"


def write_schemas(document: Json, folder: Path) -> str:
    """Write the definitions of an `/openapi/v2` document; return the location to give to kubeconform."""
    definitions = {name: _strict(each) for name, each in document["definitions"].items()}
    (folder / "definitions.json").write_text(json.dumps({"definitions": definitions}), encoding="utf-8")
    for name, each in document["definitions"].items():
        for kind in each.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"] or kind["version"]  # kubeconform uses v1 as a group
            path = folder / f"{kind['kind'].lower()}-{kind['version']}-{group}.json"
            path.write_text(json.dumps({"$ref": f"definitions.json#/definitions/{name}"}), encoding="utf-8")
    return str(folder / LOCATION)


def _strict(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the schema with unknown fields refused and int-or-string formats allowing both."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string":
        return {"type": ["string", "integer"]}
    made = {key: _strict(each) for key, each in schema.items() if key != "format"}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
