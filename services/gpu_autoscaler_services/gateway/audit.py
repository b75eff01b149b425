"""The audit trail of the gateway: an entry for each act, before the gateway passes it on, and for each that it refuses.

A store that does not answer holds up no act: a freeze must work without it. The recorded fact of the act then makes the
entry (`audit_projection.py`), with the name that the fact has.
"""

import asyncio
import uuid
from collections import OrderedDict
from http import HTTPStatus

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gpu_autoscaler.core.intake.admission import job_id_of
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobRejected, JobRequested
from gpu_autoscaler.events.policy import PolicyDirectiveGiven, PolicyDirectiveLifted
from gpu_autoscaler.model.audit import AuditEntry, EntryPoint, instant_text
from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway.access import ACCESS, NO_ACCESS_RULES, Access, Caller
from gpu_autoscaler_services.gateway.problems import Problem

STORE_SECONDS_MAX = 2.0  # of wall time that an act waits for its entry
# A caller who tries a wrong request again and again fills no disk: further refusals are counted.
REFUSALS_PER_MINUTE_MAX = 30
CALLERS_COUNT_MAX = 1000
WINDOW_SECONDS = 60.0
REASON_LENGTH_MAX = 1000
NAME_LENGTH_MAX = 300
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
COMMAND_AGENT = "gpu-autoscaler-cli/"

UNKNOWN = Caller(name="")

log = structlog.get_logger()


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody does."""

    verb: str
    object: str = ""  # empty: unknown
    project_id: str | None = None
    claimed_who: str = ""  # as the fact says
    reason: str = ""


ACT: web.RequestKey[Act] = web.RequestKey("act", Act)


def act_of(fact: Fact, event_id: str = "") -> Act | None:
    """Return the act that a fact records; None: it records none."""
    match fact:
        case JobRequested():
            job_id = job_id_of(fact.job_id, event_id)
            return Act(verb="submit", object=f"job/{job_id}", project_id=fact.project_id, claimed_who=fact.submitted_by)
        case JobCancelRequested():
            return Act(verb="cancel", object=f"job/{fact.job_id}", claimed_who=fact.requested_by, reason=fact.note)
        case PolicyDirectiveGiven():
            verb, key = str(fact.directive.__struct_config__.tag), fact.directive.key
            return Act(verb=verb, object=f"directive/{key}", claimed_who=fact.given_by, reason=fact.reason)
        case PolicyDirectiveLifted():
            return Act(verb="resume", object=f"directive/{fact.key}", claimed_who=fact.lifted_by, reason=fact.reason)
        case DemandReported():
            return Act(verb="report", object=f"demand/{fact.source}", reason=fact.note)
        case JobRejected():
            text = "; ".join(f"{violation.field}: {violation.reason}" for violation in fact.violations)
            object_ = f"job/{fact.job_id}" if fact.job_id is not None else f"request/{fact.request_id}"
            return Act(verb="submit", object=object_, reason=text)
        case _:
            return None


class _Window(msgspec.Struct):
    """The refusals of one caller in a minute."""

    begun_at: float
    access: Access
    listed_count: int = 0
    unlisted_count: int = 0


class AuditTrail:
    """Writes entries about the acts of callers."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    async def allowed(self, access: Access, act: Act, fact_id: str) -> None:
        """Record that the gateway passes the act on, as this fact."""
        entry = self._entry(access, act)
        await self._write(msgspec.structs.replace(entry, fact_id=fact_id))

    async def refused(self, access: Access, act: Act, status: int, reason: str) -> None:
        """Record that the act was refused, or could not be done; beyond the limit of the caller, count it."""
        await self.flush()
        window = self._window(access)
        if window.listed_count >= REFUSALS_PER_MINUTE_MAX:
            window.unlisted_count += 1
            return
        window.listed_count += 1
        outcome = "failed" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"
        entry = self._entry(access, act)
        await self._write(
            msgspec.structs.replace(entry, outcome=outcome, status=int(status), reason=reason[:REASON_LENGTH_MAX])
        )

    async def flush(self) -> None:
        """Record the number of refusals that have no entry, of callers whose minute is over."""
        now = Clock.monotonic_seconds()
        for key, window in tuple(self._windows.items()):
            if now - window.begun_at > WINDOW_SECONDS:
                del self._windows[key]
                await self._record_unlisted(window)

    def _window(self, access: Access) -> _Window:
        """Return the caller's minute. Callers beyond the limit share one, as do all without a known name."""
        key = access.key if access.key in self._windows or len(self._windows) < CALLERS_COUNT_MAX else ""
        return self._windows.setdefault(key, _Window(begun_at=Clock.monotonic_seconds(), access=access))

    async def _record_unlisted(self, window: _Window) -> None:
        if window.unlisted_count:
            reason = f"{window.unlisted_count} more refusals within a minute"
            entry = self._entry(window.access, Act(verb="several", reason=reason))
            await self._write(msgspec.structs.replace(entry, outcome="refused", unlisted_count=window.unlisted_count))

    def _entry(self, access: Access, act: Act) -> AuditEntry:
        caller = access.caller
        return AuditEntry(
            entry_id=str(uuid.uuid4()),
            at=instant_text(self._clock.now()),
            who=(act.claimed_who if caller is None else caller.name)[:NAME_LENGTH_MAX],
            authentication="none" if caller is None else caller.authentication,
            entry_point=access.entry_point,
            agent=access.agent,
            verb=act.verb,
            object=act.object[:NAME_LENGTH_MAX],
            project_id=None if act.project_id is None else act.project_id[:NAME_LENGTH_MAX],
            reason=act.reason[:REASON_LENGTH_MAX],
        )

    async def _write(self, entry: AuditEntry) -> None:
        try:
            async with asyncio.timeout(STORE_SECONDS_MAX):
                await self._store.append_audit((entry,))
        except (TransientError, ConfigError, TimeoutError) as error:
            log.warning(
                "audit entry not stored", entry=msgspec.to_builtins(entry), error=str(error) or type(error).__name__,
                step="none for an allowed act, whose recorded fact makes an entry; a refused one is here alone",
            )  # fmt: skip


def rest_entry_point(request: web.Request) -> tuple[EntryPoint, str]:
    """Return where a request over REST comes from, as it says, and its User-Agent."""
    agent = request.headers.get("User-Agent", "")[:NAME_LENGTH_MAX].encode(errors="replace").decode()
    if agent.startswith(COMMAND_AGENT):
        return "cli", agent
    # Browsers set it, and scripts of a page cannot (Fetch Metadata Request Headers, W3C).
    return ("page" if request.headers.get("Sec-Fetch-Site") == "same-origin" else "rest"), agent


_VERBS = {
    "submit_job": "submit",
    "cancel_job": "cancel",
    "give_directive": "direct",
    "lift_directive": "resume",
    "report_demand": "report",
}


@web.middleware
async def audited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record refused and failed acts."""
    try:
        return await handler(request)
    except Problem as problem:
        await _refused(request, problem.status, problem.sentence)
        raise
    except web.HTTPException as error:
        if error.status >= HTTPStatus.BAD_REQUEST:
            await _refused(request, error.status, error.reason)
        raise
    except TransientError as error:
        await _refused(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        raise
    except PermanentError as error:
        await _refused(request, HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        raise


async def _refused(request: web.Request, status: int, reason: str) -> None:
    route = getattr(request.match_info.handler, "__self__", None)
    verb = _VERBS.get(getattr(route, "operation_id", ""))
    if request.method in READING_METHODS or verb is None:
        return
    access = request.get(ACCESS)
    if access is None:  # before the caller is known
        entry_point, agent = rest_entry_point(request)
        access = Access(UNKNOWN, NO_ACCESS_RULES, entry_point=entry_point, agent=agent)
    key, job_id = request.match_info.get("key"), request.match_info.get("job_id")
    about = f"directive/{key}" if key else f"job/{job_id}" if job_id else ""
    await request.app[AUDIT].refused(access, request.get(ACT, Act(verb=verb, object=about)), status, reason)


AUDIT: web.AppKey[AuditTrail] = web.AppKey("audit", AuditTrail)
