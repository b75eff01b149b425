"""The asynchronous client, on aiohttp: the methods of `GPUJobClient` as coroutines and asynchronous iterators."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import aiohttp

from gpu_manager_sdk import calls, filters, models
from gpu_manager_sdk.calls import FINAL_STATES, Call, Listing
from gpu_manager_sdk.client import ANSWER_SECONDS_MAX, POLL_SECONDS, RESUME_SECONDS
from gpu_manager_sdk.connection import DEFAULT_RETRIES, Endpoint, Retries
from gpu_manager_sdk.errors import ConnectionFailed, GPUManagerError, NotFound, WaitTimedOut, read_problem
from gpu_manager_sdk.events import Event, EventReader
from gpu_manager_sdk.log_lines import LogReader

LINE_BYTES_MAX = 16 << 20  # a plan of a large cluster is one line of an event stream

T = TypeVar("T")
R = TypeVar("R")


class AsyncGPUJobClient:
    """Submits GPU jobs and reads the cluster. Raises GPUManagerError for every failure.

    A job is named by its id, or by its name where exactly one active job, or else one job at all, has it. Use it as an
    asynchronous context manager, or close it.
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
        self._session: aiohttp.ClientSession | None = None

    @property
    def api_url(self) -> str:
        return self._endpoint.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def submit(
        self, job: models.JobRequested | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> models.Job:
        """Submit a job; repeating a call with the same key, within a day, does not submit another."""
        return await self.send(calls.submit(job, idempotency_key))

    async def validate(self, job: models.JobRequested | Mapping[str, Any]) -> models.Job:
        """Return the job as it would be submitted; raises InvalidRequest with every violation. Nothing is submitted."""
        return await self.send(calls.validate(job))

    async def simulate(self, *jobs: models.JobRequested | Mapping[str, Any]) -> models.SimulatedPlan:
        """Return what would be bought if these jobs were submitted now. Nothing is submitted."""
        return await self.send(calls.simulate(jobs))

    async def get(self, job: str) -> models.Job:
        """Return a job."""
        return await self._of_job(job, calls.job, self.send)

    def list(self, *, limit: int | None = None, **wanted: Unpack[filters.ListJobsFilters]) -> AsyncIterator[models.Job]:
        """Yield jobs, the newest first, also ended ones; pages are read as they are needed. `mine`: those that the
        caller submitted, by the name of its token."""
        return self._listed(calls.jobs(limit, wanted))

    async def cancel(self, job: str) -> models.Job:
        """Cancel a job; it ends within seconds. A job that was cancelled already stays so."""
        return await self._of_job(job, calls.cancel, self.send)

    async def changes(
        self, job: str, *, timeout_seconds: float | None = None, poll_seconds: float = POLL_SECONDS
    ) -> AsyncIterator[models.Job]:
        """Yield the job now, and at each change of its status until it has ended. Raises WaitTimedOut.

        The gateway may be away meanwhile, for OUTAGE_SECONDS_MAX at a time.
        """
        clock = asyncio.get_running_loop().time
        started_at = seen_at = clock()
        shown = await self.get(job)
        yield shown
        while shown.status not in FINAL_STATES:
            if timeout_seconds is not None and clock() - started_at + poll_seconds > timeout_seconds:
                raise WaitTimedOut(shown, timeout_seconds)
            await asyncio.sleep(poll_seconds)
            try:
                latest = await self.send(calls.job(shown.job_id))
            except GPUManagerError as error:
                if not error.is_temporary or clock() - seen_at > calls.OUTAGE_SECONDS_MAX:
                    raise
                continue
            seen_at = clock()
            if latest.status != shown.status:
                yield latest
            shown = latest

    async def wait(
        self,
        job: str,
        *,
        until: str | None = None,
        timeout_seconds: float | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> models.Job:
        """Return the job when it has ended, or when it has the status `until`. Raises WaitTimedOut."""
        states = self.changes(job, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds)
        async for shown in states:
            if shown.status == until or shown.status in FINAL_STATES:
                return shown
        raise AssertionError("changes end with a final state")

    async def why(self, kind: str, name: str) -> models.Why:
        """Explain a node, pod, job or request: what it waits for or why it exists, and its history."""
        return await self.send(calls.why(kind, name))

    async def status(self) -> models.Status:
        """Return the cluster in numbers."""
        return await self.send(calls.read("status", models.Status))

    def nodes(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListNodesFilters]
    ) -> AsyncIterator[models.Node]:
        """Yield nodes, from order to termination, by name."""
        return self._listed(calls.nodes(limit, wanted))

    def plans(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListPlansFilters]
    ) -> AsyncIterator[models.Plan]:
        """Yield plans, the newest first; old ones come from the store."""
        return self._listed(calls.plans(limit, wanted))

    def facts(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListFactsFilters]
    ) -> AsyncIterator[models.RecordedFact]:
        """Yield recent facts, the newest first."""
        return self._listed(calls.facts(limit, wanted))

    async def cost(self, span_seconds: int = 3600) -> models.Cost:
        """Return spend by time span and by project."""
        return await self.send(calls.read("cost", models.Cost, span_seconds=span_seconds))

    def budgets(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListBudgetsFilters]
    ) -> AsyncIterator[models.Budget]:
        """Yield each spend budget."""
        return self._listed(calls.budgets(limit, wanted))

    async def settings(self) -> models.Settings:
        """Return the settings of the gateway and the policy that is in force; secrets are hidden."""
        return await self.send(calls.settings())

    def offers(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListOffersFilters]
    ) -> AsyncIterator[models.OfferStatus]:
        """Yield available and unavailable offers, by name."""
        return self._listed(calls.offers(limit, wanted))

    def demand(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListDemandFilters]
    ) -> AsyncIterator[models.Demand]:
        """Yield active demand reports."""
        return self._listed(calls.demand(limit, wanted))

    async def report_demand(self, report: models.DemandReported | Mapping[str, Any]) -> models.Demand:
        """Report demand of a source; it replaces the source's previous report."""
        return await self.send(calls.write("demand", models.Demand, report))

    def directives(self, *, limit: int | None = None) -> AsyncIterator[models.Directive]:
        """Yield active freezes, pauses and overrides."""
        return self._listed(calls.directives(limit))

    async def direct(
        self,
        directive: models.Freeze | models.PausePool | models.Override,
        *,
        reason: str,
        until: datetime,
        given_by: str = "",
    ) -> models.Directive:
        """Set a directive until an instant of cluster time; it replaces the previous one of its key."""
        return await self.send(calls.directive(directive, reason, until, given_by))

    async def lift(self, key: str, *, reason: str = "", lifted_by: str = "") -> models.Directive:
        """End a directive early."""
        return await self.send(calls.lift(key, reason, lifted_by))

    def audit(
        self, *, limit: int | None = None, **wanted: Unpack[filters.ListAuditEntriesFilters]
    ) -> AsyncIterator[models.AuditItem]:
        """Yield entries of the audit trail, by default the last one first."""
        return self._listed(calls.audit(limit, wanted))

    async def events(self, *subjects: str, last_event_id: str = "") -> AsyncIterator[Event]:
        """Yield facts as they arrive, without end. A broken connection is resumed without a gap."""
        reader = EventReader(last_event_id)
        while True:
            response = await self._stream(calls.events(subjects, reader.position))
            reader.connected()
            with contextlib.closing(response), contextlib.suppress(OSError, aiohttp.ClientError):
                async for line in response.content:
                    event = reader.read(line)
                    if event is not None:
                        yield event
                    if reader.is_closed:
                        break
            await asyncio.sleep(reader.reconnect_seconds)

    async def logs(
        self,
        job: str,
        *,
        member: int | None = None,
        container: str | None = None,
        follow: bool = False,
        tail_lines: int | None = None,
        previous: bool = False,
        timestamps: bool = False,
    ) -> AsyncIterator[str]:
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
            response = await self._of_job(job, reader.call, self._stream)
            with contextlib.closing(response):
                try:
                    async for raw in response.content:
                        line = reader.read(raw)
                        if line is not None:
                            yield line
                except (OSError, aiohttp.ClientError) as error:
                    if not reader.is_resumable():
                        raise ConnectionFailed(calls.broken_log(error), was_sent=True) from error
                else:
                    for line in reader.rest():
                        yield line
                    return
            await asyncio.sleep(RESUME_SECONDS)

    async def _listed(self, listing: Listing[T]) -> AsyncIterator[T]:
        while listing.call is not None:
            for item in listing.take(await self.send(listing.call)):
                yield item

    async def send(self, call: Call[T]) -> T:
        """Send a call and return its answer, with retries."""
        return await self._retried(call, self._answer)

    async def _of_job(self, job: str, call_of: Callable[[str], Call[T]], send: Callable[[Call[T]], Awaitable[R]]) -> R:
        try:
            return await send(call_of(job))
        except NotFound as missing:
            candidates = (await self.send(calls.named(job))).items
            return await send(call_of(calls.the_job_named(job, candidates, missing).job_id))

    async def _retried(self, call: Call[T], attempt: Callable[[Call[T]], Awaitable[R]]) -> R:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        for number in itertools.count(1):
            try:
                return await attempt(call)
            except GPUManagerError as error:
                delay = self._retries.delay_seconds(
                    error, attempt=number, elapsed_seconds=clock() - started_at, is_repeatable=call.is_repeatable
                )
                if delay is None:
                    raise
            await asyncio.sleep(delay)
        raise AssertionError("counting has no end")

    async def _answer(self, call: Call[T]) -> T:
        response = await self._opened(call, aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX))
        with contextlib.closing(response):
            try:
                body = await response.read()
            except (OSError, aiohttp.ClientError) as error:
                raise self._failed(error, was_sent=True) from error
        return call.decoded(body, self.api_url)

    async def _stream(self, call: Call[Any]) -> aiohttp.ClientResponse:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECONDS_MAX, sock_read=call.silence_seconds_max)
        return await self._retried(call, lambda call: self._opened(call, limits))

    async def _opened(self, call: Call[Any], limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Return a response below 400, with its body unread."""
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=LINE_BYTES_MAX)
        try:
            response = await self._session.request(
                call.method,
                self._endpoint.url_of(call.target),
                data=call.body,
                headers=call.all_headers(self._endpoint.token()),
                timeout=limits,
                ssl=self._endpoint.tls or True,
                middlewares=(_once(),),
            )
        except (OSError, aiohttp.ClientError) as error:
            raise self._failed(error, was_sent=not isinstance(error, aiohttp.ClientConnectorError)) from error
        if response.status < HTTPStatus.BAD_REQUEST:
            return response
        with contextlib.closing(response):
            try:
                body = await response.read()
            except (OSError, aiohttp.ClientError) as error:
                raise self._failed(error, was_sent=True) from error
        raise read_problem(response.status, body, response.headers.get("Retry-After"))

    def _failed(self, error: Exception, *, was_sent: bool) -> ConnectionFailed:
        return calls.connection_failed(error, self.api_url, ANSWER_SECONDS_MAX, was_sent=was_sent)


def _once() -> aiohttp.ClientMiddlewareType:
    """Return a middleware that sends one request: aiohttp repeats a GET or DELETE by itself when a connection breaks
    (`_retry_connection`), and a DELETE is not always repeatable."""
    is_sent = False

    async def sent_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        nonlocal is_sent
        if is_sent:
            raise aiohttp.ClientConnectionError("the connection broke before the answer")
        is_sent = True
        return await handler(request)

    return sent_once
