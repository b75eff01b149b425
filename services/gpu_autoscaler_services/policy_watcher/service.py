"""The policy watcher: decides which AutoscalingPolicy objects are active, and writes their status.

Only its deletion, while its definition exists, deactivates a policy: an unreadable object does not.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol

import msgspec
import structlog

from gpu_autoscaler.core.explain.kube_events import MESSAGE_LENGTH_MAX, Announcement
from gpu_autoscaler.core.policy.documents import DocumentResolution, resolve_documents
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.catalog import STATE_FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.kube.protocol import POLICIES, Changed, Deleted, Kind, Listed, NotFound, WatchItem
from gpu_autoscaler.kube.translate.policy import document, spec_of, status_of
from gpu_autoscaler.kube.wire.policy import DEFINITION, DEFINITION_PATH, VERSION, Policy, PolicySpec, PolicyStatus
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.policy_documents import PolicyDocument
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler_services.policy_watcher.status import policy_status

# Between two status writes that change only counts and costs; a change of conditions is written at once.
STATUS_INTERVAL = timedelta(seconds=30)
# The documents are published again before the stream drops them (`bus/streams.py`), for readers of the oldest fact.
REPUBLISH_AFTER = timedelta(days=7)

log = structlog.get_logger()


class Policies(Protocol):
    """The Kubernetes calls for policies."""

    def watch(self, kind: Kind[Any]) -> AsyncIterator[WatchItem]:
        """List, then watch, endlessly."""

    async def read(self, path: str) -> Mapping[str, Any]:
        """Return an object. Raises NotFound, TransientError, PermanentError."""

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Apply a merge patch. Raises NotFound, TransientError, PermanentError."""


class Events(Protocol):
    """Where announcements are written."""

    async def record(self, announcement: Announcement, now: datetime) -> None:
        """Write the announcement. Raises TransientError, PermanentError."""


class PolicyWatcher:
    """Checks policies against each other and the policy file. After a restart it reads everything again."""

    name: ClassVar[str] = "policy_watcher"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = STATE_FACTS
    publishes: ClassVar[tuple[type[Fact], ...]] = (PolicyDocumentsAccepted,)
    urgent: ClassVar[tuple[type[Fact], ...]] = (PolicyDocumentsAccepted,)  # then the status is due
    tick_seconds: ClassVar[float | None] = 2.0

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        policies: Policies,
        events: Events,
        *,
        provider: str,
        report: Callable[[str], None],
    ) -> None:
        """`provider`: the name of the configured provider. `report`: gets the state of the definition as text."""
        self._view = view
        self._file = policy
        self._policies = policies
        self._events = events
        self._provider = provider
        self._report = report
        self._objects: dict[str, Policy] = {}  # by uid
        self._is_listed = False
        self._definition_problem = ""  # while not empty, no policy is deactivated
        self._status_problem = ""  # why no status can be written; does not affect which policies are active
        self._accepted: tuple[PolicyDocument, ...] | None = None  # by the last check
        self._specs: dict[str, PolicySpec] = {}  # by uid, of active policies
        self._written: dict[str, tuple[PolicyStatus, datetime]] = {}
        self._announced: dict[str, str] = {}  # uid -> message

    def use_policy(self, policy: ScalingPolicy) -> None:
        self._file = policy

    # ---- watching

    def sources(self) -> Sequence[AsyncIterator[WatchItem]]:
        """Return the watch of policies; without a definition it yields empty lists."""
        return [self._policies.watch(POLICIES)]

    async def on_item(self, item: WatchItem) -> Outputs:
        """Remember the item; the next tick publishes what follows from it."""
        match item:
            case Listed():
                await self._on_listed(item)
            case Changed():
                self._objects[item.object.metadata.uid] = _policy(item)
            case Deleted():
                # The deletion of a definition first deletes all its objects, which must stay active.
                self._set_definition_problem(await self._find_definition_problem())
                if not self._definition_problem:
                    self._objects.pop(item.object.metadata.uid, None)
        return ()

    async def _on_listed(self, item: Listed) -> None:
        """Take the list. An empty list counts only if the definition exists now and existed before."""
        had_problem = self._definition_problem
        listed = {policy.metadata.uid: policy for policy in item.objects if isinstance(policy, Policy)}
        is_less = not listed.keys() >= self._objects.keys()
        self._set_definition_problem(await self._find_definition_problem() if item.version == 0 or is_less else "")
        if self._definition_problem or (had_problem and not listed):
            return
        self._objects, self._is_listed = listed, True

    async def _find_definition_problem(self) -> str:
        """Return why policies cannot be read; empty if they can."""
        try:
            definition = await self._policies.read(DEFINITION_PATH)
        except NotFound:
            return "is not installed; kubectl apply -f deploy/charts/gpu-autoscaler/crds"
        except PermanentError as exc:
            log.warning("policy definition read refused, assumed installed", error=str(exc))
            return ""
        if definition["metadata"].get("deletionTimestamp"):
            return "is being deleted"
        served = [version["name"] for version in definition["spec"]["versions"] if version["served"]]
        if VERSION not in served:
            return f"serves {', '.join(served) or 'no version'}, not {VERSION}; install the definition of this release"
        return ""

    def _set_definition_problem(self, problem: str) -> None:
        if problem != self._definition_problem:
            if problem:
                log.warning("policies unreadable, last accepted policies stay active", definition=problem)
            else:
                log.info("policies readable again")
        self._definition_problem = problem
        shown = problem or self._status_problem
        text = f"{DEFINITION} {shown}" if shown else f"{len(self._objects)} policies"
        self._report(f"{text}; {len(self._active())} active")

    # ---- checking

    async def on_tick(self, now: datetime) -> Outputs:
        """Publish the active policies if the stream has others; else write the status of the objects."""
        if not self._is_listed:
            return ()
        resolution, unreadable = self._judge()
        self._accepted = resolution.accepted
        known = self._view.state.policy_documents
        is_old = known is not None and now - known.accepted_at > REPUBLISH_AFTER
        if is_old or resolution.accepted != (() if known is None else known.documents):
            last = datetime.min.replace(tzinfo=now.tzinfo) if known is None else known.accepted_at
            # The latest instant counts, and the clock may have been set back.
            at = max(now, last + timedelta(microseconds=1))
            log.info(
                "policies activated",
                names=[f"{accepted.name}@{accepted.generation}" for accepted in resolution.accepted],
            )
            return (PolicyDocumentsAccepted(documents=resolution.accepted, accepted_at=at),)
        await self._write_statuses({**resolution.rejected, **unreadable}, now)
        return ()

    def _active(self) -> tuple[PolicyDocument, ...]:
        """Return the last accepted policies: from memory, else the stream, else the status of the objects."""
        if self._accepted is not None:
            return self._accepted
        known = self._view.state.policy_documents
        return tuple(filter(None, map(_active_of, self._objects.values()))) if known is None else known.documents

    def _judge(self) -> tuple[DocumentResolution, dict[str, tuple[str, ...]]]:
        documents: list[PolicyDocument] = []
        unreadable: dict[str, tuple[str, ...]] = {}
        before = {active.uid: active for active in self._active()}
        specs: dict[str, PolicySpec] = {}
        for uid, policy in self._objects.items():
            try:
                specs[uid] = spec_of(policy)
                documents.append(document(policy, specs[uid], policy.metadata.generation))
            except PermanentError as exc:
                unreadable[uid] = (str(exc),)
                if uid in before:
                    documents.append(before[uid])
        resolution = resolve_documents(documents, before.values(), self._file, self._provider)
        for accepted in resolution.accepted:
            if accepted.uid in specs and accepted.generation == self._objects[accepted.uid].metadata.generation:
                self._specs[accepted.uid] = specs[accepted.uid]
        return resolution, unreadable

    # ---- status

    async def _write_statuses(self, refused: Mapping[str, tuple[str, ...]], now: datetime) -> None:
        """Write changed statuses, and an Event for each new result. Failures are retried with the next tick."""
        active = {document.uid: document for document in self._active()}
        self._written = {uid: written for uid, written in self._written.items() if uid in self._objects}
        for uid, policy in tuple(self._objects.items()):  # the watch changes them during writes
            before = self._written[uid][0] if uid in self._written else status_of(policy)
            generation, why = policy.metadata.generation, refused.get(uid, ())
            status = policy_status(
                before,
                generation,
                active.get(uid),
                self._specs.get(uid, before.active_spec),
                why,
                self._view.state,
                now,
            )
            try:
                await self._write(policy, before, status, now)
                await self._announce(policy, status, now)
            except TransientError as exc:
                log.warning("policy status write failed, retried", error=str(exc))
                return
            except NotFound:  # the policy was deleted, or the definition has no status
                await self._check_status_subresource()
            except PermanentError as exc:
                log.warning("policy status write refused", policy=policy.metadata.name, error=str(exc))

    async def _check_status_subresource(self) -> None:
        """Report a definition without a status subresource. Repeated with the next tick."""
        try:
            definition = await self._policies.read(DEFINITION_PATH)
        except (NotFound, PermanentError, TransientError):
            return  # reported with the next list
        versions = definition["spec"]["versions"]
        ours: Mapping[str, Any] = next((version for version in versions if version["name"] == VERSION), {})
        has_status = "status" in ours.get("subresources", {})
        problem = "" if has_status else "has no status subresource; install the definition of this release"
        if problem != self._status_problem:
            self._status_problem = problem
            self._set_definition_problem(self._definition_problem)

    async def _write(self, policy: Policy, before: PolicyStatus, status: PolicyStatus, now: datetime) -> None:
        written = self._written.get(policy.metadata.uid)
        if status == before and written is not None:
            return
        is_due = written is None or now - written[1] >= STATUS_INTERVAL
        if not is_due and status.conditions == before.conditions and status.pools == before.pools:
            return
        body = msgspec.to_builtins(status)  # None removes a field: a merge patch
        await self._policies.patch(f"{POLICIES.path('', policy.metadata.name)}/status", {"status": body})
        self._written[policy.metadata.uid], self._status_problem = (status, now), ""

    async def _announce(self, policy: Policy, status: PolicyStatus, now: datetime) -> None:
        """Write a `PolicyAccepted` or `PolicyRefused` Event, once per result."""
        accepted, ready = status.conditions
        is_refused = accepted.status == "False"
        message = f"{accepted.message}; {ready.message}" if is_refused else ready.message
        if self._announced.get(policy.metadata.uid) == message:
            return
        announcement = Announcement(
            kind="AutoscalingPolicy",
            namespace="",
            name=policy.metadata.name,
            uid=policy.metadata.uid,
            reason="PolicyRefused" if is_refused else "PolicyAccepted",
            message=message[:MESSAGE_LENGTH_MAX],
            is_warning=is_refused,
        )
        await self._events.record(announcement, now)
        self._announced[policy.metadata.uid] = message


def _policy(item: Changed) -> Policy:
    assert isinstance(item.object, Policy)  # noqa: S101 - by the kind of the watch
    return item.object


def _active_of(policy: Policy) -> PolicyDocument | None:
    """Return the active document by the object's own status, for the case that all streams are lost."""
    status, generation = status_of(policy), policy.metadata.generation
    if status.active_generation is None:
        return None
    try:
        spec = spec_of(policy) if status.active_generation == generation else status.active_spec
    except PermanentError:
        spec = None
    return None if spec is None else document(policy, spec, status.active_generation)
