"""Nothing of a cloud is claimed without a test that shows it."""

from types import ModuleType

import pytest
from tests.tidy.clouds import PAGE, page, shown

from gpu_autoscaler.providers import aws, azure, gcp
from gpu_autoscaler.providers.karpenter.translate import KNOWN_WORDS


def test_the_page_is_what_the_marks_say() -> None:
    """`python -m tests.tidy.clouds` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page(shown())


@pytest.mark.parametrize(("cloud", "said"), [("aws", aws), ("azure", azure), ("gcp", gcp)])
def test_every_call_and_error_of_a_cloud_is_shown(cloud: str, said: ModuleType) -> None:
    """By a test that carries the mark."""
    found = shown()
    missing = [name for name in said.permissions.CALLS if (cloud, "calls", name) not in found]
    missing += [name for name in sorted(said.translate.KNOWN_ERRORS) if (cloud, "errors", name) not in found]
    assert missing == []


def test_every_word_that_karpenter_passes_on_is_shown() -> None:
    """By a test that carries the mark."""
    found = shown()
    assert [word for word in KNOWN_WORDS if ("karpenter", "errors", word) not in found] == []
