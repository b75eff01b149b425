"""AWS's wire formats: requests as calls with parameters, and bodies of answers.

Protocols: `ec2` and `query` (forms, XML) and JSON 1.1, as botocore's service models name them.
"""

import io
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import msgspec

Environ = dict[str, Any]
BODY_BYTES_MAX = 2**20
REQUEST_ID = "00000000-0000-4000-8000-000000000000"
Protocol = Literal["ec2", "query", "json"]

_SERVICES: Mapping[str, Protocol] = {"ec2": "ec2", "autoscaling": "query"}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a service."""

    service: str  # as in the signature: ec2, autoscaling, pricing, servicequotas
    name: str  # RunInstances
    parameters: dict[str, str]  # of forms; JSON: under "body"

    @property
    def protocol(self) -> Protocol:
        return _SERVICES.get(self.service, "json")

    def listed(self, name: str) -> list[str]:
        """Return the values of `name.1`, `name.2` ... or of `name.member.1` ..."""
        return [
            value
            for key, value in self.parameters.items()
            if key.startswith(f"{name}.") and key.rpartition(".")[2].isdigit()
        ]

    def tags(self, resource: str) -> dict[str, str]:
        tags = {}
        for key, value in self.parameters.items():
            head, _, last = key.rpartition(".")
            specification = ".".join(head.split(".")[:2])
            if (
                last == "Key"
                and head.startswith("TagSpecification.")
                and self.parameters.get(f"{specification}.ResourceType") == resource
            ):
                tags[value] = self.parameters.get(f"{head}.Value", "")
        return tags


def read_call(environ: Environ) -> Call:
    """Return the call; the body can be read again afterwards."""
    length = min(int(environ.get("CONTENT_LENGTH") or 0), BODY_BYTES_MAX)
    body = environ["wsgi.input"].read(length)
    environ["wsgi.input"] = io.BytesIO(body)
    # AWS4-HMAC-SHA256 Credential=<key>/<date>/<region>/<service>/aws4_request, ...
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0].split("/")
    service = scope[3] if len(scope) > 3 else ""
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return Call(service=service, name=target.rpartition(".")[2], parameters={"body": body.decode()})
    form = dict(parse_qsl(body.decode(), keep_blank_values=True))
    return Call(service=service, name=form.pop("Action", ""), parameters=form)


def error_body(call: Call, code: str, message: str) -> bytes:
    """Return the error in the service's format."""
    if call.protocol == "json":
        return msgspec.json.encode({"__type": code, "message": message})
    if call.protocol == "ec2":
        inner = f"<Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        return _xml(f"<Response>{inner}<RequestID>{REQUEST_ID}</RequestID></Response>")
    inner = f"<Error><Type>Sender</Type><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
    return _xml(f"<ErrorResponse>{inner}<RequestId>{REQUEST_ID}</RequestId></ErrorResponse>")


def answer_body(call: Call, inner: str) -> bytes:
    """Return a successful XML answer with `inner`."""
    if call.protocol == "ec2":
        return _xml(f"<{call.name}Response><requestId>{REQUEST_ID}</requestId>{inner}</{call.name}Response>")
    result = f"<{call.name}Result>{inner}</{call.name}Result>"
    return _xml(
        f"<{call.name}Response>{result}<ResponseMetadata><RequestId>{REQUEST_ID}</RequestId></ResponseMetadata>"
        f"</{call.name}Response>"
    )


def element(name: str, value: object) -> str:
    """Return one element with its text."""
    return f"<{name}>{escape(str(value))}</{name}>"


def elements(name: str, items: Iterable[Mapping[str, object]]) -> str:
    """Return a list of structures."""
    inner = "".join(
        f"<item>{''.join(element(key, value) for key, value in structure.items())}</item>" for structure in items
    )
    return f"<{name}>{inner}</{name}>"


def _xml(inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{inner}'.encode()
