"""CreateFleet of type `instant`: moto's ignores tokens and MinTargetCapacity and reports no errors.

A fleet becomes RunInstances calls for one instance each, which moto knows. If the first fails, all would, so none is
launched, and the answer is an empty fleet with the error. Source: EC2 API Reference, "CreateFleet",
`MinTargetCapacity`; EC2 User Guide, "Configure an EC2 Fleet of type instant" (read 2026-11-22).
"""

import io
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from gpu_autoscaler.simcloud.aws.wire import Call, Environ, element

_OVERRIDE = "LaunchTemplateConfigs.1.Overrides.1"
_TEMPLATE = "LaunchTemplateConfigs.1.LaunchTemplateSpecification"
_CODE = re.compile(rb"<Code>([^<]+)</Code><Message>([^<]*)</Message>")


def count_of(call: Call) -> int:
    """Return the number of requested instances."""
    return int(call.parameters.get("TargetCapacitySpecification.TotalTargetCapacity", 1))


def is_spot(call: Call) -> bool:
    """Return whether the fleet requests spot."""
    return call.parameters.get("TargetCapacitySpecification.DefaultTargetCapacityType") == "spot"


def wrong_in(call: Call) -> tuple[str, str] | None:
    """Return code and message if EC2 rejects the request, None if it does not."""
    parameters = call.parameters
    if parameters.get("Type") != "instant":
        return "InvalidParameterValue", "This fake makes fleets of type instant."
    options = "SpotOptions" if is_spot(call) else "OnDemandOptions"
    least = int(parameters.get(f"{options}.MinTargetCapacity", 0))
    singles = (parameters.get(f"{options}.{name}") for name in ("SingleInstanceType", "SingleAvailabilityZone"))
    if least and "true" not in singles:
        return "InvalidParameterCombination", "MinTargetCapacity needs SingleInstanceType or SingleAvailabilityZone."
    if least != count_of(call):
        return "InvalidParameterValue", "This fake makes fleets whose MinTargetCapacity is their TotalTargetCapacity."
    if f"{_OVERRIDE}.InstanceType" not in parameters or any(
        key.startswith("LaunchTemplateConfigs.2") for key in parameters
    ):
        return "InvalidParameterValue", "This fake makes fleets with one override."
    return None


def one_of(call: Call) -> Call:
    """Return the RunInstances call for one instance of the fleet."""
    requested = call.parameters
    wanted = {
        "InstanceType": requested[f"{_OVERRIDE}.InstanceType"],
        "SubnetId": requested.get(f"{_OVERRIDE}.SubnetId"),
        "Placement.GroupName": requested.get(f"{_OVERRIDE}.Placement.GroupName"),
        "MinCount": "1",
        "MaxCount": "1",
        "InstanceMarketOptions.MarketType": "spot" if is_spot(call) else None,
        "InstanceMarketOptions.SpotOptions.MaxPrice": requested.get(f"{_OVERRIDE}.MaxPrice"),
        "DryRun": requested.get("DryRun"),
        **{
            f"LaunchTemplate{key.removeprefix(_TEMPLATE)}": requested[key]
            for key in requested
            if key.startswith(_TEMPLATE)
        },
        **{key: requested[key] for key in requested if key.startswith("TagSpecification.")},
    }
    parameters = {key: value for key, value in wanted.items() if value is not None}
    return Call(service=call.service, name="RunInstances", parameters=parameters)


def environ_of(call: Call, environ: Environ) -> Environ:
    """Return the WSGI request of this call."""
    body = urlencode({"Action": call.name, "Version": "2016-11-15", **call.parameters}).encode()
    return {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}


def error_in(body: bytes) -> tuple[str, str]:
    """Return code and message of a refused RunInstances."""
    match = _CODE.search(body)
    return ("InternalError", "") if match is None else (match[1].decode(), match[2].decode())


def made(call: Call, number: int, ids: Sequence[str]) -> str:
    """Return the answer of a fleet with these instances."""
    listed = "".join(element("item", instance_id) for instance_id in ids)
    instances = (
        f"<item>{_source(call)}<instanceIds>{listed}</instanceIds>"
        + element("instanceType", call.parameters[f"{_OVERRIDE}.InstanceType"])
        + "</item>"
    )
    return _answer(number, f"<errorSet/><fleetInstanceSet>{instances}</fleetInstanceSet>")


def empty(call: Call, number: int, errors: Mapping[str, str]) -> str:
    """Return the answer of an empty fleet, with errors by code and message."""
    described = "".join(
        f"<item>{_source(call)}{element('errorCode', code)}{element('errorMessage', message)}</item>"
        for code, message in errors.items()
    )
    return _answer(number, f"<errorSet>{described}</errorSet><fleetInstanceSet/>")


def _answer(number: int, inner: str) -> str:
    return element("fleetId", f"fleet-{number:08x}-0000-4000-8000-000000000000") + inner


def _source(call: Call) -> str:
    return element("lifecycle", "spot" if is_spot(call) else "on-demand")
