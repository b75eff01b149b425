"""Every published name, one a line: facts, reasons, policy, settings, metrics, REST, commands, chart, CRD, streams.

`python -m tests.tidy.published` writes the recorded list after a name was added. A name that is gone is a breaking
change: it needs a major version and an entry in docs/upgrading.md.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from prometheus_client.metrics_core import Metric

from gpu_autoscaler.model.reasons.buy import BuyReason
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.drain import DrainReason, KeepReason, ReleaseReason
from gpu_autoscaler.runtime.config import Settings
from gpu_autoscaler.runtime.metrics import Metrics, reason_tags
from gpu_autoscaler_services.cli.main import app
from gpu_autoscaler_services.registry import specs

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("published_names.txt")
_CHART = ROOT / "deploy" / "charts" / "gpu-autoscaler"


def names() -> list[str]:
    """Return all published names, sorted."""
    parts = (_facts, _reasons, _policy, _settings, _metrics, _rest, _commands, _chart, _policy_object, _streams)
    return sorted({name for part in parts for name in part()})


def _facts() -> Iterator[str]:
    for path in sorted((ROOT / "schemas" / "facts").glob("*.json")):
        schema = json.loads(path.read_text())
        kind = path.name.removesuffix(".json")
        yield f"fact {kind}"
        yield from (f"fact {kind} {field}" for field in schema.get("properties", {}))
        yield from (f"fact {kind} {name}" for name in _definitions(schema))


def _reasons() -> Iterator[str]:
    for tag in reason_tags(BuyReason, DrainReason, ReleaseReason, KeepReason, DeferReason):
        yield f"reason {tag}"


def _policy() -> Iterator[str]:
    schema = json.loads((ROOT / "schemas" / "policy.json").read_text())
    yield from (f"policy {name}" for name in _definitions(schema))


def _settings() -> Iterator[str]:
    yield from (f"setting {name}" for name in _definitions(msgspec.json.schema(Settings)))


def _metrics() -> Iterator[str]:
    for spec in specs():
        for process in spec.processes:
            for family in exported_by(spec.name, process.role):
                labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
                yield f"metric {family.name}{{{','.join(labels)}}}"


def exported_by(service: str, role: str | None) -> list[Metric]:
    """Return the metric families that the active process of a service exports after its first tick."""
    metrics = Metrics(service, role=role)
    metrics.is_leading = metrics.has_ticked = lambda: True
    return list(metrics.registry.collect())


def _rest() -> Iterator[str]:
    document = yaml.safe_load((ROOT / "schemas" / "openapi.yaml").read_text())
    for path, operations in document["paths"].items():
        yield from (f"rest {method.upper()} {path}" for method in operations)
    for name, schema in document["components"]["schemas"].items():
        yield from (f"rest {name}.{field}" for field in schema.get("properties", {}))


def _commands() -> Iterator[str]:
    def walk(group: Any, prefix: str) -> Iterator[str]:  # noqa: ANN401 - the type of a lazily imported command
        for name in group:
            if name.startswith("-"):
                continue
            command = group[name]
            yield f"command {prefix}{name}"
            if command.default_command is not None:
                for argument in command.assemble_argument_collection(default_parameter=app.default_parameter):
                    yield from (
                        f"command {prefix}{name} {option}" for option in argument.names if option.startswith("--")
                    )
            yield from walk(command, f"{prefix}{name} ")

    yield from walk(app, "")


def _chart() -> Iterator[str]:
    def walk(schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in schema.get("properties", {}).items():
            yield f"chart {prefix}{name}"
            yield from walk(value, f"{prefix}{name}.")
            yield from walk(value.get("items", {}), f"{prefix}{name}[].")

    document = json.loads((_CHART / "values.schema.json").read_text())
    yield from walk(document, "")
    for name, struct in (("policy", "ScalingPolicy"), ("settings", "Settings")):  # keys below are those of the code
        yield from (f"chart {name}.{key}" for key in document["definitions"][struct]["properties"])


def _policy_object() -> Iterator[str]:
    def walk(schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in schema.get("properties", {}).items():
            yield f"crd {prefix}{name}"
            yield from walk(value, f"{prefix}{name}.")
            yield from walk(value.get("items", {}), f"{prefix}{name}[].")

    definition = yaml.safe_load((_CHART / "crds" / "autoscalingpolicies.yaml").read_text())
    for version in definition["spec"]["versions"]:
        yield from walk(version["schema"]["openAPIV3Schema"], f"{version['name']} ")


def _streams() -> Iterator[str]:
    document = json.loads((ROOT / "schemas" / "streams.json").read_text())
    for kind, rows in document.items():
        if isinstance(rows, list):
            yield from (f"{kind} {row['name']}" for row in rows if "name" in row)


def _definitions(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, definition in schema.get("$defs", {}).items():
        yield from (f"{name}.{field}" for field in definition.get("properties", {}))


def main() -> None:
    """Record the names of today."""
    RECORDED.write_text("".join(f"{name}\n" for name in names()), encoding="utf-8")


if __name__ == "__main__":
    main()
