"""The blocking client. Standard library only below it, so that a command that uses it starts quickly.

A client holds no connection: it may be shared by threads, and needs no closing.
"""

import contextlib
import http.client
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar, Unpack

from gpu_manager_sdk import calls, filters, models
from gpu_manager_sdk.calls import FINAL_STATES, Call, Listing
from gpu_manager_sdk.connection import DEFAULT_RETRIES, Endpoint, Retries
from gpu_manager_sdk.errors import ConnectionFailed, GPUManagerError, NotFound, WaitTimedOut, read_problem
from gpu_manager_sdk.events import Event, EventReader
from gpu_manager_sdk.log_lines import LogReader

ANSWER_SECONDS_MAX = 30.0  # the gateway answers from memory; longer is a fault
POLL_SECONDS = 1.0
RESUME_SECONDS = 1.0  # before a log whose connection broke is followed again

T = TypeVar("T")
R = TypeVar("R")
Opened = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class GPUJobClient:
    """Submits GPU jobs and reads the cluster. Raises GPUManagerError for every failure.

    A job is named by its id, or by its name where exactly one active job, or else one job at all, has it.
    """

    def __init__(
        self,
        api_url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        self._endpoint = Endpoint(api_url, token, token_file, ca_file)
        self._retries = retries

    @property
    def api_url(self) -> str:
        return self._endpoint.url

    def submit(self, job: models.JobRequested | Mapping[str, Any], *, idempotency_key: str | None = None) -> models.Job:
        """Submit a job; repeating a call with the same key, within a day, does not submit another."""
        return self.send(calls.submit(job, idempotency_key))

    def validate(self, job: models.JobRequested | Mapping[str, Any]) -> models.Job:
        """Return the job as it would be submitted; raises InvalidRequest with every violation. Nothing is submitted."""
        return self.send(calls.validate(job))

    def simulate(self, *jobs: models.JobRequested | Mapping[str, Any]) -> models.SimulatedPlan:
        """Return what would be bought if these jobs were submitted now. Nothing is submitted."""
        return self.send(calls.simulate(jobs))

    def get(self, job: str) -> models.Job:
        """Return a job."""
        return self._of_job(job, calls.job, self.send)

    def list(self, *, limit: int | None = None, **wanted: Unpack[filters.ListJobsFilters]) -> Iterator[models.Job]:
        """Yield jobs, the newest first, also ended ones; pages are read as they are needed. `mine`: those that the
        caller submitted, by the name of its token."""
        return self._listed(calls.jobs(limit, wanted))

    def cancel(self, job: str) -> models.Job:
        """Cancel a job; it ends within seconds. A job that was cancelled already stays so."""
        return self._of_job(job, calls.cancel, self.send)

    def changes(
        self, job: str, *, timeout_seconds: float | None = None, poll_seconds: float = POLL_SECONDS
    ) -> Iterator[models.Job]:
        """Yield the job now, and at each change of its status until it has ended. Raises WaitTimedOut.

        The gateway may be away meanwhile, for OUTAGE_SECONDS_MAX at a time.
        """
        started_at = seen_at = time.monotonic()
        shown = self.get(job)
        yield shown
        while shown.status not in FINAL_STATES:
            if timeout_seconds is not None and time.monotonic() - started_at + poll_seconds > timeout_seconds:
                raise WaitTimedOut(shown, timeout_seconds)
            time.sleep(poll_seconds)
            try:
                latest = self.send(calls.job(shown.job_id))
            except GPUManagerError as error:
                if not error.is_temporary or time.monotonic() - seen_at > calls.OUTAGE_SECONDS_MAX:
                    raise
                continue
            seen_at = time.monotonic()
            if latest.status != shown.status:
                yield latest
            shown = latest

    def wait(
        self,
        job: str,
        *,
        until: str | None = None,
        timeout_seconds: float | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> models.Job:
        """Return the job when it has ended, or when it has the status `until`. Raises WaitTimedOut."""
        states = self.changes(job, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds)
        return next(shown for shown in states if shown.status == until or shown.status in FINAL_STATES)

    def why(self, kind: str, name: str) -> models.Why:
        """Explain a node, pod, job or request: what it waits for or why it exists, and its history."""
        return self.send(calls.why(kind, name))

    def status(self) -> models.Status:
        """Return the cluster in numbers."""
        return self.send(calls.read("status", models.Status))

    def nodes(self, *, limit: int | None = None, **wanted: Unpack[filters.ListNodesFilters]) -> Iterator[models.Node]:
        """Yield nodes, from order to termination, by name."""
        return self._listed(calls.nodes(limit, wanted))

    def plans(self, *, limit: int | None = None, **wanted: Unpack[filters.ListPlansFilters]) -> Iterator[models.Plan]:
        """Yield plans, the newest first; old ones come from the store."""
        return self._listed(calls.plans(limit, wanted))

    def facts(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListFactsFilters]
    ) -> Iterator[models.RecordedFact]:
        """Yield recent facts, the newest first."""
        return self._listed(calls.facts(limit, wanted))

    def cost(self, span_seconds: int = 3600) -> models.Cost:
        """Return spend by time span and by project."""
        return self.send(calls.read("cost", models.Cost, span_seconds=span_seconds))

    def budgets(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListBudgetsFilters]
    ) -> Iterator[models.Budget]:
        """Yield each spend budget."""
        return self._listed(calls.budgets(limit, wanted))

    def settings(self) -> models.Settings:
        """Return the settings of the gateway and the policy that is in force; secrets are hidden."""
        return self.send(calls.settings())

    def offers(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListOffersFilters]
    ) -> Iterator[models.OfferStatus]:
        """Yield available and unavailable offers, by name."""
        return self._listed(calls.offers(limit, wanted))

    def demand(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListDemandFilters]
    ) -> Iterator[models.Demand]:
        """Yield active demand reports."""
        return self._listed(calls.demand(limit, wanted))

    def report_demand(self, report: models.DemandReported | Mapping[str, Any]) -> models.Demand:
        """Report demand of a source; it replaces the source's previous report."""
        return self.send(calls.write("demand", models.Demand, report))

    def directives(self, *, limit: int | None = None) -> Iterator[models.Directive]:
        """Yield active freezes, pauses and overrides."""
        return self._listed(calls.directives(limit))

    def direct(
        self,
        directive: models.Freeze | models.PausePool | models.Override,
        *,
        reason: str,
        until: datetime,
        given_by: str = "",
    ) -> models.Directive:
        """Set a directive until an instant of cluster time; it replaces the previous one of its key."""
        return self.send(calls.directive(directive, reason, until, given_by))

    def lift(self, key: str, *, reason: str = "", lifted_by: str = "") -> models.Directive:
        """End a directive early."""
        return self.send(calls.lift(key, reason, lifted_by))

    def audit(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListAuditEntriesFilters]
    ) -> Iterator[models.AuditItem]:
        """Yield entries of the audit trail, by default the last one first."""
        return self._listed(calls.audit(limit, wanted))

    def events(self, *subjects: str, last_event_id: str = "") -> Iterator[Event]:
        """Yield facts as they arrive, without end. A broken connection is resumed without a gap."""
        reader = EventReader(last_event_id)
        while True:
            connection, response = self._stream(calls.events(subjects, reader.position))
            reader.connected()
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                for line in response:
                    event = reader.read(line)
                    if event is not None:
                        yield event
                    if reader.is_closed:
                        break
            time.sleep(reader.reconnect_seconds)

    def logs(
        self,
        job: str,
        *,
        member: int | None = None,
        container: str | None = None,
        follow: bool = False,
        tail_lines: int | None = None,
        previous: bool = False,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """Yield the lines that a member of the job has written; with `follow`, until its container ends.

        `previous`: of the container before its last restart. A followed log goes on where its connection broke; another
        one raises ConnectionFailed.
        """
        reader = LogReader(
            {
                "member": member,
                "container": container,
                "tail_lines": tail_lines,
                "follow": follow,
                "previous": previous,
            },
            is_stamped=timestamps,
        )
        while True:
            connection, response = self._of_job(job, reader.call, self._stream)
            with contextlib.closing(connection):
                try:
                    for raw in response:
                        line = reader.read(raw)
                        if line is not None:
                            yield line
                except (OSError, http.client.HTTPException) as error:
                    if not reader.is_resumable():
                        raise ConnectionFailed(calls.broken_log(error), was_sent=True) from error
                else:
                    yield from reader.rest()
                    return
            time.sleep(RESUME_SECONDS)

    def _listed(self, listing: Listing[T]) -> Iterator[T]:
        while listing.call is not None:
            yield from listing.take(self.send(listing.call))

    def send(self, call: Call[T]) -> T:
        """Send a call and return its answer, with retries."""
        return self._retried(call, self._answer)

    def _of_job(self, job: str, call_of: Callable[[str], Call[T]], send: Callable[[Call[T]], R]) -> R:
        try:
            return send(call_of(job))
        except NotFound as missing:
            candidates = self.send(calls.named(job)).items
            return send(call_of(calls.the_job_named(job, candidates, missing).job_id))

    def _retried(self, call: Call[T], attempt: Callable[[Call[T]], R]) -> R:
        started_at = time.monotonic()
        for number in itertools.count(1):
            try:
                return attempt(call)
            except GPUManagerError as error:
                elapsed = time.monotonic() - started_at
                delay = self._retries.delay_seconds(
                    error, attempt=number, elapsed_seconds=elapsed, is_repeatable=call.is_repeatable
                )
                if delay is None:
                    raise
            time.sleep(delay)
        raise AssertionError("counting has no end")

    def _answer(self, call: Call[T]) -> T:
        connection, response = self._opened(call, ANSWER_SECONDS_MAX)
        with contextlib.closing(connection):
            try:
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(error, was_sent=True) from error
        return call.decoded(body, self.api_url)

    def _stream(self, call: Call[Any]) -> Opened:
        return self._retried(call, lambda call: self._opened(call, call.silence_seconds_max))

    def _opened(self, call: Call[Any], silence_seconds_max: float) -> Opened:
        """Return an open connection with a response below 400."""
        parts, headers, was_sent = self._endpoint.parts, call.all_headers(self._endpoint.token()), False
        host = parts.hostname or ""
        connection = (
            http.client.HTTPConnection(host, parts.port, timeout=ANSWER_SECONDS_MAX)
            if self._endpoint.tls is None
            else http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_SECONDS_MAX, context=self._endpoint.tls)
        )
        try:
            connection.connect()
            was_sent, stream = True, connection.sock
            connection.request(call.method, f"{parts.path}/api/v1/{call.target}", body=call.body, headers=headers)
            response = connection.getresponse()
            stream.settimeout(silence_seconds_max)
            body = response.read() if response.status >= http.client.BAD_REQUEST else b""
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failed(error, was_sent=was_sent) from error
        if response.status >= http.client.BAD_REQUEST:
            connection.close()
            raise read_problem(response.status, body, response.headers.get("Retry-After"))
        return connection, response

    def _failed(self, error: Exception, *, was_sent: bool) -> ConnectionFailed:
        return calls.connection_failed(error, self.api_url, ANSWER_SECONDS_MAX, was_sent=was_sent)
