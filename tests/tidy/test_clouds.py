"""Every cloud API call, error and notice that the drivers know is covered by a test, and docs/clouds.md lists it."""

from collections.abc import Iterable

import pytest
from tests.tidy.clouds import PAGE, read_coverage, render_page

from gpu_autoscaler.providers.aws import permissions as aws_calls
from gpu_autoscaler.providers.aws import translate as aws
from gpu_autoscaler.providers.azure import permissions as azure_calls
from gpu_autoscaler.providers.azure import translate as azure
from gpu_autoscaler.providers.gcp import permissions as gcp_calls
from gpu_autoscaler.providers.gcp import translate as gcp
from gpu_autoscaler.providers.karpenter.translate import KNOWN_CODES


def test_page_is_up_to_date() -> None:
    """`python -m tests.tidy.clouds` regenerates it."""
    assert PAGE.read_text(encoding="utf-8") == render_page(read_coverage())


@pytest.mark.parametrize(
    ("cloud", "calls", "errors"),
    [
        ("aws", aws_calls.CALLS, aws.KNOWN_ERRORS),
        ("azure", azure_calls.CALLS, azure.KNOWN_ERRORS),
        ("gcp", gcp_calls.CALLS, gcp.KNOWN_ERRORS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_call_and_error_of_a_cloud_is_covered(cloud: str, calls: Iterable[str], errors: Iterable[str]) -> None:
    """By a test with a `cloud` mark that names it."""
    coverage = read_coverage()
    missing = [name for name in calls if (cloud, "calls", name) not in coverage]
    missing += [name for name in sorted(errors) if (cloud, "errors", name) not in coverage]
    assert missing == []


def test_every_known_karpenter_reason_is_covered() -> None:
    """By a test with a `cloud` mark that names it."""
    coverage = read_coverage()
    assert [code for code in KNOWN_CODES if ("karpenter", "errors", code) not in coverage] == []
