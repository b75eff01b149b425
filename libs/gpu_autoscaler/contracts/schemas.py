"""Contracts generated from the code: JSON Schema of facts and policy, examples, AsyncAPI 3.

`gpu_autoscaler_services/contracts.py` adds streams, operations and OpenAPI, and writes the files.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import yaml

from gpu_autoscaler.bus.client_subjects import CLIENT_REQUESTS
from gpu_autoscaler.contracts.descriptions import described
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import SPEC_VERSION, encode
from gpu_autoscaler.events.examples import examples
from gpu_autoscaler.events.fact import Fact

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INSTANT = {"type": "string", "format": "date-time"}
# Any one of them; the broker of `gpu-autoscaler up` on loopback asks for none.
_SECURITY = {
    "user": {
        "type": "userPassword",
        "description": "A user of the broker with the subjects of its service, see `deploy/nats/users.conf`.",
    },
    "certificate": {"type": "X509", "description": "A client certificate, if `nats.tls_certificate_path` is set."},
    "serviceAccount": {
        "type": "plain",
        "description": "On nodes, with `nats.authCallout`: the token of the pod's service account as the password.",
    },
}

Document = dict[str, Any]


def fact_schema(fact: type[Fact]) -> Document:
    """Return the schema of an event of this fact: CloudEvents attributes and typed data."""
    (data,), components = msgspec.json.schema_components([fact], ref_template="#/$defs/{name}")
    return {
        "$schema": DIALECT,
        "$id": f"urn:gpu-autoscaler:{fact.type_name()}",
        "title": fact.type_name(),
        "description": _first_line(fact),
        **_event(fact, data),
        "$defs": described(components, [fact]),
    }


def _event(fact: type[Fact], data: Document) -> Document:
    return {
        "type": "object",
        "required": ["specversion", "id", "source", "type", "data"],
        "properties": {
            "specversion": {"const": SPEC_VERSION, "description": "Version of CloudEvents."},
            "id": {"type": "string", "minLength": 1, "description": "Equal for redeliveries; also the Nats-Msg-Id."},
            "source": {"type": "string", "description": "Service and instance that published it."},
            "type": {"const": fact.type_name(), "description": "Type of the fact with its version."},
            "time": {**_INSTANT, "description": "When it happened."},
            "datacontenttype": {"const": "application/json", "description": "Encoding of `data`."},
            "correlationid": {"type": "string", "description": "Id of the first fact of the chain."},
            "causationid": {"type": "string", "description": "Id of the fact that caused this one."},
            "data": {"description": "The fact itself.", **data},
        },
    }


def _first_line(fact: type[Fact]) -> str:
    return (fact.__doc__ or "").strip().split("\n\n", maxsplit=1)[0]


def _channel_name(fact: type[Fact]) -> str:
    return fact.subject_root()


def is_per_node(fact: type[Fact]) -> bool:
    """True for telemetry, whose subject has the UID of the node as third token."""
    return "subject" in vars(fact)


def _channel(fact: type[Fact]) -> Document:
    name = fact.type_name()
    channel: Document = {
        "address": fact.subject_root(),
        "description": _first_line(fact),
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "x-stream": fact.stream(),
    }
    if is_per_node(fact):
        channel["address"] += ".{nodeUid}"
        channel["parameters"] = {"nodeUid": {"description": "UID of the Kubernetes node."}}
    return channel


def _client_channel(fact: type[Fact]) -> Document:
    """Return the channel on which a client that the broker identifies sends its requests."""
    channel = {key: value for key, value in _channel(fact).items() if key != "x-stream"}
    return {
        **channel,
        "address": f"{fact.subject_root()}.{{client}}",
        "description": (
            "Requests in the name of the client, who may publish on its own subject alone. The gateway checks its"
            " rights and answers; no stream stores them. Repeat one without an answer with the same Nats-Msg-Id."
        ),
        "parameters": {"client": {"description": "The client's name in base64url, without padding."}},
    }


_ANSWER: Document = {
    "name": "client_request.answer",
    "summary": "The acknowledgment of JetStream with the job, or an error with the problem as REST answers it.",
    "contentType": "application/json",
    "payload": {
        "type": "object",
        "properties": {
            "stream": {"type": "string", "description": "The stream that stores the request."},
            "seq": {"type": "integer", "description": "Its last sequence: the request is stored at or before it."},
            "job_id": {"type": "string", "description": "The job that was submitted or cancelled."},
            "error": {
                "type": "object",
                "description": "As clients of JetStream read it.",
                "required": ["code", "description"],
                "properties": {
                    "code": {"type": "integer", "description": "The status of REST: 403, 422, 429 ..."},
                    "description": {"type": "string", "description": "Every violation, then the type of the problem."},
                },
            },
            "problem": {"type": "object", "description": "`ProblemDocument` of the OpenAPI document."},
        },
    },
}


def _client_operations() -> Document:
    """Return the operations that answer clients by name."""
    return {
        f"gateway.receive.{fact.subject_root()}.client": {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{fact.subject_root()}.client"},
            "tags": [{"name": "gateway"}],
            "reply": {
                "address": {"location": "$message.header#/reply", "description": "The inbox that NATS names."},
                "channel": {"$ref": "#/channels/client_request.answer"},
            },
        }
        for fact in CLIENT_REQUESTS
    }


def asyncapi(version: str, services: Mapping[str, tuple[Iterable[type[Fact]], Iterable[type[Fact]]]]) -> Document:
    """Return the AsyncAPI 3 document. `services` maps a name to received and sent facts."""
    payloads, components = msgspec.json.schema_components(FACTS, ref_template="#/components/schemas/{name}")
    messages = {
        fact.type_name(): {
            "name": fact.type_name(),
            "title": fact.type_name(),
            "summary": _first_line(fact),
            "contentType": "application/cloudevents+json",
            "payload": _event(fact, payload),
        }
        for fact, payload in zip(FACTS, payloads, strict=True)
    }
    operations: Document = {}
    for service, (received, sent) in services.items():
        for action, facts in (("receive", received), ("send", sent)):
            for fact in sorted(facts, key=_channel_name):
                operations[f"{service}.{action}.{fact.subject_root()}"] = {
                    "action": action,
                    "channel": {"$ref": f"#/channels/{_channel_name(fact)}"},
                    "tags": [{"name": service}],
                }
    operations |= _client_operations()
    messages[_ANSWER["name"]] = _ANSWER
    answers = {_ANSWER["name"]: {"$ref": f"#/components/messages/{_ANSWER['name']}"}}
    return {
        "asyncapi": "3.1.0",
        "info": {
            "title": "gpu-autoscaler facts",
            "version": version,
            "description": "Facts on NATS JetStream, as structured CloudEvents 1.0.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/cloudevents+json",
        "servers": {
            "local": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "The broker of `gpu-autoscaler up` and of the chart, with JetStream.",
                "security": [{"$ref": f"#/components/securitySchemes/{name}"} for name in _SECURITY],
            }
        },
        "channels": {
            **{_channel_name(fact): _channel(fact) for fact in FACTS},
            **{f"{fact.subject_root()}.client": _client_channel(fact) for fact in CLIENT_REQUESTS},
            "client_request.answer": {
                "address": None,
                "description": "Answers to requests of clients.",
                "messages": answers,
            },
        },
        "operations": operations,
        "components": _without_discriminators(
            {"messages": messages, "schemas": described(components, FACTS), "securitySchemes": _SECURITY}
        ),
    }


def _without_discriminators(document: Document) -> Document:
    """Remove discriminators: JSON Schema has none, and the `const` of each variant is sufficient."""
    return {
        key: _without_discriminators(value)
        if isinstance(value, dict)
        else [_without_discriminators(item) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for key, value in document.items()
        if key != "discriminator" or not isinstance(value, dict) or "propertyName" not in value
    }


def fact_files() -> dict[str, str]:
    """Return schema and example of each fact, and the schema of the policy: path below `schemas/` -> text."""
    files = {f"facts/{fact.type_name()}.json": to_json(fact_schema(fact)) for fact in FACTS}
    for envelope in examples():
        files[f"examples/{envelope.type}.json"] = to_json(msgspec.json.decode(encode(envelope)))
    files["policy.json"] = to_json({"$schema": DIALECT, **msgspec.json.schema(ScalingPolicy)})
    return files


def to_json(document: object) -> str:
    """Return indented JSON in the order of the code, with a final newline."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def to_yaml(document: object) -> str:
    """Return YAML in the order of the code, without anchors."""
    return "# Generated by `make schemas`; do not edit.\n" + yaml.dump(
        document, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=110
    )


class _PlainDumper(yaml.SafeDumper):
    """Repeats shared parts instead of anchors, which many API tools do not resolve."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - signature of PyYAML
        return True
