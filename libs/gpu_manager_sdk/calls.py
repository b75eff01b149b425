"""Every call of the API as data: what is sent, what comes back, and whether it may be repeated.

Both clients send these; nothing here does IO.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from gpu_manager_sdk import filters, models
from gpu_manager_sdk.errors import AmbiguousName, ConnectionFailed, NotFound

FINAL_STATES = frozenset({models.JobState.COMPLETED, models.JobState.FAILED, models.JobState.CANCELLED})
PAGE_COUNT = 200
CANDIDATES_COUNT_MAX = 20  # jobs of one name that are looked at
SILENCE_SECONDS_MAX = 45.0  # of a stream of events: three missed heartbeats
OUTAGE_SECONDS_MAX = 600.0  # of the gateway while a job is waited for: an upgrade takes a minute or two
LOG_SILENCE_SECONDS_MAX = 3600.0  # of a container whose log is followed, as the gateway allows
USER_AGENT = "gpu-manager-sdk/0.2.0"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """A request and the type of its answer."""

    method: str
    path: str  # below /api/v1/
    answer: type[T]
    query: Mapping[str, object] = field(default_factory=dict)  # None is left out
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True  # a second time changes nothing more
    silence_seconds_max: float = SILENCE_SECONDS_MAX  # of a stream

    @property
    def target(self) -> str:
        """Return path and query."""
        known = {name: _text(value) for name, value in self.query.items() if value is not None}
        return f"{self.path}?{urlencode(known, doseq=True)}" if known else self.path

    def all_headers(self, token: str | None) -> dict[str, str]:
        """Return the headers to send."""
        headers = {"Accept": "*/*", "User-Agent": USER_AGENT, **self.headers}
        if self.body is not None:
            headers["Content-Type"] = "application/json"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def decoded(self, body: bytes, url: str) -> T:
        """Return the answer. Raises ConnectionFailed if this API did not write it."""
        try:
            return msgspec.json.decode(body, type=self.answer)
        except msgspec.MsgspecError as error:
            detail = f"{url} did not answer as this API does ({error}); check that the address names the gateway"
            raise ConnectionFailed(detail, was_sent=True, is_temporary=False) from error


def _text(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return [_text(item) for item in value] if isinstance(value, list | tuple) else value


def _segment(name: str) -> str:
    return quote(name, safe="")


def read(path: str, answer: type[T], **query: object) -> Call[T]:
    """Return a call that reads."""
    return Call(method="GET", path=path, answer=answer, query=query)


def write(path: str, answer: type[T], body: object, **headers: str) -> Call[T]:
    """Return a call that sends an object. Each takes the place of the previous one of its key, so it is repeatable."""
    return Call(method="POST", path=path, answer=answer, body=msgspec.json.encode(body), headers=headers)


def submit(job: models.JobRequested | Mapping[str, Any], idempotency_key: str | None) -> Call[models.Job]:
    """Submit a job; the key makes repetitions harmless."""
    key = idempotency_key or str(uuid.uuid4())
    return write("gpu/jobs", models.Job, job, **{"Idempotency-Key": key})


def validate(job: models.JobRequested | Mapping[str, Any]) -> Call[models.Job]:
    """Check a job without submitting it."""
    return write("gpu/jobs:validate", models.Job, job)


def simulate(jobs: Sequence[models.JobRequested | Mapping[str, Any]]) -> Call[models.SimulatedPlan]:
    """Plan with further jobs, without submitting them."""
    return write("plan:simulate", models.SimulatedPlan, {"jobs": list(jobs)})


def job(job_id: str) -> Call[models.Job]:
    """Show a job."""
    return read(f"gpu/jobs/{_segment(job_id)}", models.Job)


def cancel(job_id: str) -> Call[models.Job]:
    """Cancel a job."""
    return Call(method="DELETE", path=f"gpu/jobs/{_segment(job_id)}", answer=models.Job)


class Listing(Generic[T]):
    """A list that is read page by page, as its items are needed: send `call`, give the answer to `take`, until there
    is no further call."""

    def __init__(self, path: str, answer: type, limit: int | None, filters: Mapping[str, object]) -> None:
        """`answer`: the type of a page, dict for plain data. `limit`: number of items; None: all."""
        self._path, self._answer, self._filters, self._left = path, answer, filters, limit
        self.call: Call[Any] | None = None if limit is not None and limit <= 0 else self._page(None)

    def take(self, page: Any) -> tuple[T, ...]:  # noqa: ANN401 - any of the API's pages
        """Return the items of the page."""
        items, cursor = (
            (page["items"], page["next_cursor"]) if isinstance(page, dict) else (page.items, page.next_cursor)
        )
        self._left = None if self._left is None else self._left - len(items)
        has_more = cursor is not None and (self._left is None or self._left > 0)
        self.call = self._page(cursor) if has_more else None
        return tuple(items)

    def _page(self, cursor: str | None) -> Call[Any]:
        count = PAGE_COUNT if self._left is None else min(PAGE_COUNT, self._left)
        return read(self._path, self._answer, **self._filters, limit=count, cursor=cursor)


def jobs(limit: int | None, wanted: filters.ListJobsFilters) -> Listing[models.Job]:
    """List jobs."""
    return Listing("gpu/jobs", models.JobPage, limit, {**wanted})


def nodes(limit: int | None, wanted: filters.ListNodesFilters) -> Listing[models.Node]:
    """List nodes."""
    return Listing("nodes", models.NodeList, limit, {**wanted})


def plans(limit: int | None, wanted: filters.ListPlansFilters) -> Listing[models.Plan]:
    """List plans."""
    return Listing("plans", models.PlanList, limit, {**wanted})


def facts(limit: int | None, wanted: filters.ListFactsFilters) -> Listing[models.RecordedFact]:
    """List recent facts."""
    return Listing("facts", models.FactList, limit, {**wanted})


def budgets(limit: int | None, wanted: filters.ListBudgetsFilters) -> Listing[models.Budget]:
    """List spend budgets."""
    return Listing("budget", models.BudgetList, limit, {**wanted})


def offers(limit: int | None, wanted: filters.ListOffersFilters) -> Listing[models.OfferStatus]:
    """List offers."""
    return Listing("offers", models.OfferList, limit, {**wanted})


def demand(limit: int | None, wanted: filters.ListDemandFilters) -> Listing[models.Demand]:
    """List active demand reports."""
    return Listing("demand", models.DemandList, limit, {**wanted})


def directives(limit: int | None) -> Listing[models.Directive]:
    """List active directives."""
    return Listing("directives", models.DirectiveList, limit, {})


def audit(limit: int | None, wanted: filters.ListAuditEntriesFilters) -> Listing[models.AuditItem]:
    """List entries of the audit trail."""
    return Listing("audit", models.AuditPage, limit, {**wanted})


def named(name: str) -> Call[models.JobPage]:
    """List the newest jobs of a name."""
    return read("gpu/jobs", models.JobPage, job_name=name, limit=CANDIDATES_COUNT_MAX)


def the_job_named(name: str, candidates: Iterable[models.Job], missing: NotFound) -> models.Job:
    """Return the only active job of the name, else its only job. Raises AmbiguousName, or `missing` for none."""
    found = tuple(candidates)
    active = tuple(candidate for candidate in found if candidate.status not in FINAL_STATES)
    for choice in (active, found):
        if len(choice) == 1:
            return choice[0]
    if not found:
        raise missing
    raise AmbiguousName(name, active or found)


def settings() -> Call[models.Settings]:
    """Show settings and policy."""
    return read("settings", models.Settings)


def why(kind: str, name: str) -> Call[models.Why]:
    """Explain an object."""
    return read(f"why/{_segment(kind)}/{_segment(name)}", models.Why)


def directive(
    directive: models.Freeze | models.PausePool | models.Override, reason: str, until: datetime, given_by: str
) -> Call[models.Directive]:
    """Set a directive."""
    request = models.DirectiveRequest(directive=directive, reason=reason, until=until, given_by=given_by)
    return write("directives", models.Directive, request)


def lift(key: str, reason: str, lifted_by: str) -> Call[models.Directive]:
    """End a directive. A second time finds none, or ends a new one of the same key: not repeatable."""
    return Call(
        method="DELETE",
        path=f"directives/{_segment(key)}",
        answer=models.Directive,
        query={"reason": reason, "lifted_by": lifted_by},
        is_repeatable=False,
    )


def events(subjects: tuple[str, ...], last_event_id: str) -> Call[bytes]:
    """Stream events after a position."""
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    return Call(method="GET", path="events", answer=bytes, query={"subject": subjects}, headers=headers)


def logs(job_id: str, options: Mapping[str, object]) -> Call[bytes]:
    """Stream the output of a member."""
    return Call(
        method="GET",
        path=f"gpu/jobs/{_segment(job_id)}/logs",
        answer=bytes,
        query=options,
        silence_seconds_max=LOG_SILENCE_SECONDS_MAX,
    )


def broken_log(error: Exception) -> str:
    """Return the detail of a log that ended too early."""
    return f"the connection broke while the log was read ({error}); read it again"


def connection_failed(error: Exception, url: str, seconds_max: float, *, was_sent: bool) -> ConnectionFailed:
    """Return the error of a call without a complete answer."""
    if was_sent and isinstance(error, TimeoutError):
        detail = f"the gateway at {url} did not answer within {seconds_max:g} s; check its log and /readyz"
        return ConnectionFailed(detail, was_sent=was_sent, is_time_out=True)
    detail = f"cannot reach the gateway at {url} ({error}); start it, or correct the address"
    return ConnectionFailed(detail, was_sent=was_sent)
