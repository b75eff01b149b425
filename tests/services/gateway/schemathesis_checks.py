"""Loaded by Schemathesis (`SCHEMATHESIS_HOOKS`): a check of our own beside its checks."""

from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

FORM = "/problems/invalid-request"


@schemathesis.check
def form_is_as_described(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> None:
    """A request of the described form is refused for a rule that it breaks, and never for its form."""
    is_valid = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_valid and response.status_code == 422:
        assert response.json()["type"] != FORM, f"refused for its form: {response.text}"
