"""`docs/reference/problems.md`, written from the code: each type of problem, what happened, and what to do.

`make schemas` runs `python -m gpu_autoscaler_services.gateway.problems_page`, which prints the page; the gateway serves
the part of each type under its URI.
"""

import sys

from gpu_autoscaler_services.gateway.problems import PROBLEMS_PATH, TYPES, ProblemType

_HEAD = f"""\
# Problems

<!-- Written from services/gpu_autoscaler_services/gateway/problems.py by `make schemas`; do not edit. -->

Every error of the REST API is an `application/problem+json` document (RFC 9457). Programs decide by
`type`, people read `detail`: it names the cause and the next step. `violations` lists every invalid
field with its reason, all at once. Nothing was done unless the status is below 400.

`type` is a path on the gateway, such as `{PROBLEMS_PATH}/quota-exceeded`: opened there, it shows
what this page says about the type. Programs compare the path.
"""
_TAIL = """
A few errors of the HTTP server itself have the type `about:blank`. On NATS, refused requests of
clients are answered with the same sentences, and `job.rejected` carries the same violations.
"""


def problems_page() -> str:
    """Return the page."""
    parts = "\n".join(f"## {kind.name}\n\n{_rows(kind)}" for kind in TYPES)
    return f"{_HEAD}\n{parts}{_TAIL}"


def problem_page(kind: ProblemType) -> str:
    """Return what the gateway shows under the URI of a type."""
    return f"# {kind.name}\n\n{_rows(kind)}"


def _rows(kind: ProblemType) -> str:
    statuses = " or ".join(f"{status.value} {status.phrase}" for status in kind.statuses)
    return f"- Status: {statuses}\n- What happened: {kind.meaning}.\n- What to do: {kind.remedy}.\n"


if __name__ == "__main__":
    sys.stdout.write(problems_page())
