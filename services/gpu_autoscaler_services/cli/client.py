"""HTTP client of the gateway for the commands. Standard library only, so that a command starts in milliseconds."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit, Stop

DEFAULT_ADDRESS = "http://127.0.0.1:8000"
ANSWER_SECONDS_MAX = 30.0  # the gateway answers from memory; longer is a fault
SILENCE_SECONDS_MAX = 45.0  # of an event stream: three missed heartbeats

Document = dict[str, Any]

_CODES = {
    http.client.NOT_FOUND: Exit.NOT_FOUND,
    http.client.GATEWAY_TIMEOUT: Exit.TIME_OUT,
    http.client.UNPROCESSABLE_ENTITY: Exit.USAGE,
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Address of the gateway and the caller's token."""

    address: Annotated[
        str, Parameter(name="--gateway", env_var="GPU_AUTOSCALER_GATEWAY", help="Address of the gateway.")
    ] = DEFAULT_ADDRESS
    token: Annotated[
        str | None, Parameter(env_var="GPU_AUTOSCALER_TOKEN", help="Bearer token, if the gateway requires one.")
    ] = None

    def read(self, path: str, **query: object) -> Document:
        """GET `/api/v1/<path>`. Query parameters that are None are left out."""
        return self._json("GET", path + _query(query))

    def send(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Document:
        """Send a request with an optional JSON body and return the answer."""
        return self._json(method, path, None if body is None else json.dumps(body).encode(), headers or {})

    def events(self, subjects: Sequence[str]) -> Iterator[Document]:
        """Yield facts as they arrive, without end. A broken connection is reopened without a gap."""
        last_id = ""
        while True:
            resume = {"Last-Event-ID": last_id} if last_id else {}
            connection, response = self._request(
                "GET", "events" + _query({"subject": subjects}), None, resume, SILENCE_SECONDS_MAX
            )
            try:
                for event_id, name, text in _parse(response):
                    last_id = event_id or last_id
                    if name == "message":
                        yield json.loads(text)
            except (OSError, http.client.HTTPException):
                pass  # resumed from the last id; if the gateway is gone, the next request raises
            finally:
                connection.close()

    def _json(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Document:
        connection, response = self._request(method, path, body, headers or {}, ANSWER_SECONDS_MAX)
        try:
            document: Document = json.loads(response.read())
        except ValueError as error:
            raise Stop(f"{self.address} did not answer with JSON; check that --gateway names the gateway") from error
        finally:
            connection.close()
        return document

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds_max: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return the open connection with a response below 400. Raises Stop with the problem's detail otherwise."""
        connection = self._connection(seconds_max)
        all_headers = {"Accept": "*/*", **headers}
        if body is not None:
            all_headers["Content-Type"] = "application/json"
        if self.token:
            all_headers["Authorization"] = f"Bearer {self.token}"
        base = urlsplit(self.address).path.rstrip("/")
        try:
            connection.request(method, f"{base}/api/v1/{path}", body=body, headers=all_headers)
            response = connection.getresponse()
        except TimeoutError as error:
            raise Stop(
                f"the gateway at {self.address} did not answer within {seconds_max:g} s; check its log and /readyz",
                Exit.TIME_OUT,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise Stop(f"cannot reach the gateway at {self.address} ({error}); start it, or set --gateway") from error
        if response.status >= http.client.BAD_REQUEST:
            text = response.read()
            connection.close()
            raise _problem(response.status, text)
        return connection, response

    def _connection(self, seconds_max: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise Stop(f"--gateway {self.address!r} is not an address; example: {DEFAULT_ADDRESS}", Exit.USAGE)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return connect(parts.hostname, parts.port, timeout=seconds_max)


def path_segment(text: str) -> str:
    """Return the name as one segment of a path."""
    return quote(text, safe="")


def _query(query: Mapping[str, object]) -> str:
    known = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(known, doseq=True)}" if known else ""


def _problem(status: int, text: bytes) -> Stop:
    try:
        problem = json.loads(text)
        lines = [str(problem["detail"])]
        lines += [f"  - {violation['field']}: {violation['reason']}" for violation in problem.get("violations", ())]
    except (ValueError, KeyError, TypeError):
        lines = [f"the gateway answered HTTP {status} without a reason; check that --gateway names the gateway"]
    return Stop("\n".join(lines), _CODES.get(status, Exit.FAILURE))


def _parse(response: http.client.HTTPResponse) -> Iterator[tuple[str, str, str]]:
    """Yield id, name and data of each event (HTML Living Standard, "Server-sent events", read 2026-11-21)."""
    fields: dict[str, str] = {}
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield fields.get("id", ""), fields.get("event", "message"), fields["data"]
        fields = {}
