"""Translation of AWS instance types, errors and termination reasons."""

from datetime import UTC, datetime

import pytest
from tests.support.aws import moto_or_skip

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.providers.aws.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.aws.translate import code_in_message, failure, instance_of, parse_instance_type
from gpu_autoscaler.providers.protocol import LaunchRefused

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)

# GPUs of these types: model, count, GB per GPU (docs/decisions.md#prices).
CARRIES = {
    "p4d.24xlarge": ("A100", 8, 40),
    "p4de.24xlarge": ("A100", 8, 80),
    "g6.48xlarge": ("L4", 8, 24),
    "g6e.48xlarge": ("L40S", 8, 48),
    "g4dn.12xlarge": ("T4", 4, 16),
    "p5.48xlarge": ("H100", 8, 80),
}


@pytest.mark.parametrize("name", CARRIES)
def test_resources_of_an_instance_type(name: str) -> None:
    """GPU model, GPU count and memory, under the names that Kubernetes uses."""
    kind = KNOWN_INSTANCE_TYPES[name]
    model, count, gibibytes = CARRIES[name]
    assert (kind.gpu_model, kind.resources.gpu_count, kind.gpu_memory_bytes) == (model, count, gibibytes * GIBIBYTE)


def test_the_bundled_table_equals_the_api() -> None:
    """Each row equals the DescribeInstanceTypes response, where moto has one."""
    moto_or_skip()
    from moto.ec2.models.instance_types import INSTANCE_TYPES  # noqa: PLC0415 - loads slowly, and may be missing

    told = {name: parse_instance_type(INSTANCE_TYPES[name]) for name in KNOWN_INSTANCE_TYPES if name in INSTANCE_TYPES}
    differing = [
        name
        for name, kind in told.items()
        if kind is None
        or (kind.resources, kind.gpu_model, kind.gpu_memory_bytes)
        != (
            KNOWN_INSTANCE_TYPES[name].resources,
            KNOWN_INSTANCE_TYPES[name].gpu_model,
            KNOWN_INSTANCE_TYPES[name].gpu_memory_bytes,
        )
    ]
    assert len(told) > 30
    assert differing == []


def test_unsupported_gpus_are_not_offered() -> None:
    """A type with GPUs of another manufacturer."""
    told = {
        "InstanceType": "g4ad.xlarge",
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 16384},
        "GpuInfo": {"Gpus": [{"Name": "Radeon Pro V520", "Manufacturer": "AMD", "Count": 1}]},
    }
    assert parse_instance_type(told) is None


# Every refusal that has a meaning of its own: what kind it is, and how far it reaches.
REFUSALS = {
    "InsufficientInstanceCapacity": ("capacity", "offer"),
    "InsufficientHostCapacity": ("capacity", "offer"),
    "UnfulfillableCapacity": ("capacity", "offer"),
    "ReservationCapacityExceeded": ("capacity", "offer"),
    "SpotMaxPriceTooLow": ("capacity", "offer"),
    "Unsupported": ("capacity", "offer"),
    "InsufficientFreeAddressesInSubnet": ("capacity", "zone"),
    "VcpuLimitExceeded": ("quota", "region"),
    "InstanceLimitExceeded": ("quota", "region"),
    "MaxSpotInstanceCountExceeded": ("quota", "region"),
    "MaxFleetCountExceeded": ("quota", "region"),
    "UnauthorizedOperation": ("permission", "region"),
    "AccessDenied": ("permission", "region"),
    "AccessDeniedException": ("permission", "region"),
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": ("permission", "region"),
    "OptInRequired": ("permission", "region"),
    "PendingVerification": ("permission", "region"),
    "MissingParameter": ("configuration", "offer"),
    "ValidationError": ("configuration", "offer"),
    "InvalidSubnetID.NotFound": ("configuration", "offer"),
    "InvalidLaunchTemplateName.NotFoundException": ("configuration", "offer"),
    "InvalidParameterValue": ("configuration", "offer"),
}
PASSING = (
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "EC2ThrottledException",
    "TooManyRequestsException",
    "ResourceContention",
    "ScalingActivityInProgress",
    "IdempotentCallInProgress",
    "InternalError",
    "ServiceUnavailable",
    "an unknown error code",
)
CREDENTIALS = (
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)


@pytest.mark.cloud("aws", errors=REFUSALS)
@pytest.mark.parametrize("code", REFUSALS)
def test_a_launch_refusal_has_its_kind(code: str) -> None:
    """The same code of a read call is not a refusal: the call is retried."""
    refused = failure("RunInstances", code, "words", of_launch=True)
    assert isinstance(refused, LaunchRefused)
    assert ((refused.kind, refused.scope), refused.code) == (REFUSALS[code], code)
    assert isinstance(failure("DescribeInstances", code, "words", of_launch=False), TransientError)


@pytest.mark.cloud("aws", errors=PASSING)
@pytest.mark.parametrize("code", PASSING)
def test_temporary_errors_are_transient(code: str) -> None:
    """So are unknown codes: the token makes a retry safe."""
    assert isinstance(failure("RunInstances", code, "words", of_launch=True), TransientError)


@pytest.mark.cloud("aws", errors=CREDENTIALS)
@pytest.mark.parametrize("code", CREDENTIALS)
def test_credential_errors_are_not_refusals(code: str) -> None:
    """The message names the credentials and this machine's clock, which signatures depend on."""
    error = failure("RunInstances", code, "words", of_launch=True)
    assert type(error) is TransientError
    assert "check the credentials and this machine's clock" in str(error)


@pytest.mark.cloud("aws", errors=("IdempotentParameterMismatch",))
def test_a_token_used_for_another_launch_is_a_final_error() -> None:
    """A retry cannot succeed."""
    assert type(failure("RunInstances", "IdempotentParameterMismatch", "", of_launch=True)) is PermanentError


@pytest.mark.cloud("aws", errors=("failed scaling activity",))
@pytest.mark.parametrize(
    ("said", "code"),
    [
        (
            "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity.",
            "UnfulfillableCapacity",
        ),
        (
            "We currently do not have sufficient p3.2xlarge capacity in the Availability Zone you requested.",
            "InsufficientInstanceCapacity",
        ),
        ("You have requested more vCPU capacity than your current vCPU limit of 0 allows.", "VcpuLimitExceeded"),
        ("Max spot instance count exceeded. Launching EC2 instance failed.", "MaxSpotInstanceCountExceeded"),
        ("You are not authorized to use launch template: lt-1.", "UnauthorizedOperation"),
        (
            "Your requested instance type (p5.48xlarge) is not supported in your requested Availability Zone (x).",
            "Unsupported",
        ),
        (
            "InvalidAMIID.NotFound - The image id '[ami-1]' does not exist. Launching EC2 instance failed.",
            "InvalidAMIID.NotFound",
        ),
        ("Client.InternalError: Client error on launch. Launching EC2 instance failed.", "ValidationError"),
    ],
)
def test_failed_group_launches_have_a_refusal_code(said: str, code: str) -> None:
    """EC2's own codes, each of one kind; an unknown one is a configuration problem."""
    assert code_in_message(said) == code
    assert isinstance(failure("DescribeScalingActivities", code, said, of_launch=True), LaunchRefused)


def test_a_termination_has_the_cloud_s_time_or_ours() -> None:
    """EC2 gives a time only for terminations that users request."""
    told = {
        "InstanceId": "i-1",
        "InstanceType": "g4dn.xlarge",
        "Placement": {"AvailabilityZone": "eu-west-1a"},
        "LaunchTime": datetime(2026, 11, 21, 11, tzinfo=UTC),
        "State": {"Name": "terminated"},
        "StateTransitionReason": "User initiated (2026-11-21 11:30:00 GMT)",
    }
    assert instance_of(told, now=NOW).terminated_at == datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
    assert instance_of(told | {"StateTransitionReason": "Server.InternalError"}, now=NOW).terminated_at == NOW
    assert instance_of(told, now=NOW).action_id is None
