"""The gateway as the commands see it: the SDK's client with the address and token of the command line."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import Parameter

from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_manager_sdk import GPUJobClient, Retries, calls

DEFAULT_ADDRESS = "http://127.0.0.1:8000"
RETRIES = Retries(attempts_count_max=3, seconds_max=15.0)  # a person waits

AGENT = "gpu-autoscaler-cli/1"  # tells the audit trail of the gateway that a command sends the request

Document = dict[str, Any]
T = TypeVar("T")


class _Client(GPUJobClient):
    """The SDK's client, which says that a command sends the request."""

    def send(self, call: calls.Call[T]) -> T:
        return super().send(replace(call, headers={"User-Agent": AGENT, **call.headers}))


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

    @cached_property
    def client(self) -> GPUJobClient:
        """Return the SDK's client."""
        try:
            return _Client(self.address, token=self.token, retries=RETRIES)
        except ValueError as error:
            raise Stop(f"--gateway: {error}", Exit.USAGE) from error

    def read(self, path: str, **query: object) -> Document:
        """GET `/api/v1/<path>` as plain data. Query parameters that are None are left out."""
        return self.client.send(calls.read(path, dict, **query))

    def read_all(self, path: str, limit: int | None = None, **filters: object) -> Document:
        """GET a list page by page, as one document with at most `limit` items; None: all."""
        listing: calls.Listing[Any] = calls.Listing(path, dict, limit, filters)
        document: Document = {"items": []}
        while listing.call is not None:
            page = self.client.send(listing.call)
            document = {**page, "items": [*document["items"], *listing.take(page)]}
        return document


def plain(document: msgspec.Struct) -> Document:
    """Return an answer of the SDK as plain data."""
    shown: Document = msgspec.to_builtins(document)
    return shown
