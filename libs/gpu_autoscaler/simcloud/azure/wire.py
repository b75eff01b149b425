"""Azure's wire format: matches requests to calls, and checks them against Azure's API description.

Bodies are checked against the types that azure-mgmt-compute generates from the API specification: unknown fields,
values of the wrong type and missing required fields are rejected, as Azure does.
"""

import re
import types as builtin_types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Required

import msgspec

from gpu_autoscaler.simcloud.rest import Rejected, RestAnswer, RestCall

_GROUP = r"/subscriptions/(?P<subscription>[^/]+)/resourceGroups/(?P<group>[^/]+)/providers/Microsoft\.Compute"
_SUBSCRIPTION = r"/subscriptions/(?P<subscription>[^/]+)/providers/Microsoft\.Compute"
_SET = rf"{_GROUP}/virtualMachineScaleSets/(?P<scale_set>[^/]+)"


class Route(msgspec.Struct, frozen=True):
    """One call of the API."""

    name: str  # operation id of Azure's specification
    method: str
    path: str
    body: str | None = None  # type of azure.mgmt.compute.types
    queries: tuple[str, ...] = ()


ROUTES = (
    Route("VirtualMachines_List", "GET", rf"{_GROUP}/virtualMachines", queries=("$filter", "$skiptoken")),
    Route("VirtualMachines_Get", "GET", rf"{_GROUP}/virtualMachines/(?P<name>[^/]+)", queries=("$expand",)),
    Route("VirtualMachines_CreateOrUpdate", "PUT", rf"{_GROUP}/virtualMachines/(?P<name>[^/]+)", "VirtualMachine"),
    Route("VirtualMachines_Delete", "DELETE", rf"{_GROUP}/virtualMachines/(?P<name>[^/]+)", queries=("forceDeletion",)),
    Route("VirtualMachineScaleSets_CreateOrUpdate", "PUT", _SET, "VirtualMachineScaleSet"),
    Route("VirtualMachineScaleSets_Get", "GET", _SET, queries=("$expand",)),
    Route("VirtualMachineScaleSets_Update", "PATCH", _SET, "VirtualMachineScaleSetUpdate"),
    Route(
        "VirtualMachineScaleSets_DeleteInstances",
        "POST",
        rf"{_SET}/delete",
        "VirtualMachineScaleSetVMInstanceRequiredIDs",
        queries=("forceDeletion",),
    ),
    Route("VirtualMachineScaleSetVMs_List", "GET", rf"{_SET}/virtualMachines", queries=("$expand", "$skiptoken")),
    Route("VirtualMachineScaleSetVMs_Get", "GET", rf"{_SET}/virtualMachines/(?P<name>[^/]+)", queries=("$expand",)),
    Route("Operations_Get", "GET", rf"{_SUBSCRIPTION}/locations/(?P<region>[^/]+)/operations/(?P<name>[^/]+)"),
    Route("Usage_List", "GET", rf"{_SUBSCRIPTION}/locations/(?P<region>[^/]+)/usages"),
    Route("ResourceSkus_List", "GET", rf"{_SUBSCRIPTION}/skus", queries=("$filter", "includeExtendedLocations")),
    Route(
        "VirtualMachineImages_List",
        "GET",
        rf"{_SUBSCRIPTION}/locations/(?P<region>[^/]+)/publishers/(?P<publisher>[^/]+)/artifacttypes/vmimage"
        r"/offers/(?P<offer>[^/]+)/skus/(?P<sku>[^/]+)/versions",
        queries=("$top", "$orderby"),
    ),
    Route(
        "Permissions_ListForResourceGroup",
        "GET",
        r"/subscriptions/(?P<subscription>[^/]+)/resourceGroups/(?P<group>[^/]+)/providers/Microsoft\.Authorization"
        r"/permissions",
    ),
    Route(
        "AutoscaleSettings_ListByResourceGroup",
        "GET",
        r"/subscriptions/(?P<subscription>[^/]+)/resourceGroups/(?P<group>[^/]+)/providers/Microsoft\.Insights"
        r"/autoscalesettings",
    ),
    Route(
        "ActivityLogs_List",
        "GET",
        r"/subscriptions/(?P<subscription>[^/]+)/providers/Microsoft\.Insights/eventtypes/management/values",
        queries=("$filter", "$select", "$skiptoken"),
    ),
    Route("RetailPrices_List", "GET", "/api/retail/prices", queries=("$filter", "$skip")),
)
# Not maintained by Azure ("The enum data type is currently deprecated", Virtual Machines - Create Or Update).
OPEN = frozenset({"VirtualMachineSizeTypes"})
HEADERS_KEPT = ("if-match", "if-none-match")
_VERSION = re.compile(r"20\d\d-\d\d-\d\d(-preview)?")


def rejected(status: int, code: str, message: str) -> Rejected:
    """Return the refusal in Azure's format."""
    return Rejected(error_answer(status, code, message))


def error_answer(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> RestAnswer:
    """Return an error of Azure Resource Manager."""
    return RestAnswer(status=status, body={"error": {"code": code, "message": message}}, headers=headers or {})


def read_request(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> RestCall:
    """Return the call. Raises Rejected for requests that Azure would reject."""
    route, names = _route_of(method, path)
    is_public = route.name == "RetailPrices_List"
    if not is_public and not headers.get("authorization", "").startswith("Bearer "):
        raise rejected(401, "AuthenticationFailed", "Authentication failed. The 'Authorization' header is missing.")
    if not _VERSION.fullmatch(query.get("api-version", "")):
        raise rejected(
            400, "MissingApiVersionParameter", "The api-version query parameter (?api-version=) is required."
        )
    unknown = sorted(set(query) - {"api-version", *route.queries})
    if unknown:
        raise rejected(400, "InvalidParameter", f"{route.name} has no parameter {', '.join(unknown)}.")
    decoded = None
    if route.body is not None:
        try:
            decoded = msgspec.json.decode(body)
        except msgspec.DecodeError as exc:
            raise rejected(400, "InvalidRequestContent", f"The request content was invalid: {exc}") from exc
        violations = list(type_violations(decoded, _types()[route.body], ""))
        if violations:
            raise rejected(400, "InvalidRequestContent", f"{route.name}: {'; '.join(violations[:5])}")
    kept = {name: headers[name] for name in HEADERS_KEPT if name in headers}
    return RestCall(name=route.name, parameters={**names, **query, **kept}, body=decoded)


def _route_of(method: str, path: str) -> tuple[Route, dict[str, str]]:
    for route in ROUTES:
        match = re.fullmatch(route.path, path, re.IGNORECASE) if route.method == method else None
        if match is not None:
            return route, match.groupdict()
    raise rejected(404, "InvalidResourceType", f"{method} {path}: this fake has no such call.")


@cache
def _types() -> dict[str, Any]:
    from azure.mgmt.compute import types  # noqa: PLC0415 - an extra, and slow to load

    return vars(types)


@cache
def _fields_of(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - generated types
    from azure.mgmt.compute import models  # noqa: PLC0415 - as above

    return typing.get_type_hints(kind, {**vars(models), **_types()}, include_extras=True)


def type_violations(value: object, kind: Any, at: str) -> Iterator[str]:  # noqa: ANN401 - generated types
    """Yield the violations of a value against a generated type, each with its path."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Required:
        yield from type_violations(value, arguments[0], at)
    elif hasattr(kind, "__required_keys__"):
        yield from _field_violations(value, kind, at)
    elif origin in (typing.Union, builtin_types.UnionType):
        yield from _either_violations(value, arguments, at)
    elif origin is list:
        if not isinstance(value, list):
            yield f"{at}: is no list"
            return
        for number, item in enumerate(value):
            yield from type_violations(item, arguments[0], f"{at}[{number}]")
    elif origin is dict:
        if not isinstance(value, dict) or not all(isinstance(item, arguments[1]) for item in value.values()):
            yield f"{at}: is no object of {arguments[1].__name__}"
    elif kind is float:
        if not isinstance(value, int | float):
            yield f"{at}: {value!r} is no number"
    elif isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        yield f"{at}: {value!r} is no {kind.__name__}"


def _field_violations(value: object, kind: Any, at: str) -> Iterator[str]:  # noqa: ANN401 - generated types
    if not isinstance(value, dict):
        yield f"{at or 'body'}: is no object"
        return
    fields = _fields_of(kind)
    for name, inner in value.items():
        where = f"{at}.{name}" if at else name
        if name not in fields:
            yield f"{where}: {kind.__name__} has no such field"
        else:
            yield from type_violations(inner, fields[name], where)
    # Only if marked: the generated types leave that to the mark, and call all fields of some structures required.
    required = {name for name, field in fields.items() if typing.get_origin(field) is Required}
    yield from (f"{at}.{name}: is missing" for name in sorted(required - set(value)))


def _either_violations(value: object, kinds: tuple[Any, ...], at: str) -> Iterator[str]:
    """Check a value of an enumeration, in any case, or of any of the types."""
    enumerations: list[Any] = [kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "__members__")]
    if any(kind.__name__ in OPEN for kind in enumerations):
        return
    if enumerations and isinstance(value, str):
        words = {member.value.lower() for kind in enumerations for member in kind}
        if value.lower() not in words:
            yield f"{at}: {value!r} is none of {', '.join(sorted(words))}"
        return
    wrong = [list(type_violations(value, kind, at)) for kind in kinds if kind is not type(None)]
    if all(wrong):
        yield wrong[0][0]
