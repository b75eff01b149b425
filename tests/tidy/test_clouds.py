"""Every cloud API call, error and notice that the drivers know is covered by a test, and docs/clouds.md lists it."""

from types import ModuleType

import pytest
from tests.tidy.clouds import PAGE, read_coverage, render_page

from gpu_autoscaler.providers import aws, azure, gcp
from gpu_autoscaler.providers.karpenter.translate import KNOWN_CODES


def test_page_is_up_to_date() -> None:
    """`python -m tests.tidy.clouds` regenerates it."""
    assert PAGE.read_text(encoding="utf-8") == render_page(read_coverage())


@pytest.mark.parametrize(("cloud", "driver"), [("aws", aws), ("azure", azure), ("gcp", gcp)])
def test_every_call_and_error_of_a_cloud_is_covered(cloud: str, driver: ModuleType) -> None:
    """By a test with a `cloud` mark that names it."""
    coverage = read_coverage()
    missing = [name for name in driver.permissions.CALLS if (cloud, "calls", name) not in coverage]
    missing += [name for name in sorted(driver.translate.KNOWN_ERRORS) if (cloud, "errors", name) not in coverage]
    assert missing == []


def test_every_known_karpenter_reason_is_covered() -> None:
    """By a test with a `cloud` mark that names it."""
    coverage = read_coverage()
    assert [code for code in KNOWN_CODES if ("karpenter", "errors", code) not in coverage] == []
