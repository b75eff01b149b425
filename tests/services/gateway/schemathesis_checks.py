"""Loaded by Schemathesis (`SCHEMATHESIS_HOOKS`): a check of our own beside its checks, and what no query can say."""

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


@schemathesis.hook
def filter_query(context: schemathesis.HookContext, query: dict[str, Any] | None) -> bool:
    """Leave out a bool for a list of texts, which arrives as a list of the text `false`, and an object without keys,
    which arrives as an empty text."""
    assert context.operation is not None
    lists = {
        parameter.name
        for parameter in context.operation.query
        if parameter.definition.get("schema", {}).get("type") == "array"
    }
    return not any(value == {} or (name in lists and isinstance(value, bool)) for name, value in (query or {}).items())
