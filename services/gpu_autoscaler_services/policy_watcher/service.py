"""The policy watcher: policies that are objects of Kubernetes -> what is in force; and the answer on the object.

What it says is decided by; what it has said is the last good word. Nothing that it sees, or does not see, takes a
policy out of force but its own deletion while its definition stands.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol

import msgspec
import structlog

from gpu_autoscaler.core.announcements import MESSAGE_LENGTH_MAX, Announcement
from gpu_autoscaler.core.documents import DocumentResolution, resolve_documents
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.policy import PolicyDocumentsAccepted
from gpu_autoscaler.kube.protocol import POLICIES, Changed, Deleted, Kind, Listed, NotFound, WatchItem
from gpu_autoscaler.kube.translate.policy import document, spec_of, status_of
from gpu_autoscaler.kube.wire_policy import DEFINITION, DEFINITION_PATH, VERSION, Policy, PolicySpec, PolicyStatus
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.policy_documents import PolicyDocument
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs
from gpu_autoscaler_services.policy_watcher.status import told

# Figures of money and nodes move all the time; whether a policy is in force is told at once.
FIGURES_AFTER = timedelta(seconds=30)
# Said again before the stream forgets it (`bus/streams.py`), for who begins with the oldest fact.
SAID_AGAIN_AFTER = timedelta(days=7)
_FOLDED_DOMAINS = frozenset({"pod", "node", "spot", "job", "demand", "policy", "scaling", "cost"})

log = structlog.get_logger()


class Policies(Protocol):
    """Kubernetes, as far as it is about policies."""

    def watch(self, kind: Kind[Any]) -> AsyncIterator[WatchItem]:
        """List, then watch, for ever."""
        ...

    async def read(self, path: str) -> Mapping[str, Any]:
        """Return an object. Raises NotFound, TransientError, PermanentError."""
        ...

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Apply a merge patch. Raises NotFound, TransientError, PermanentError."""
        ...


class Events(Protocol):
    """Where announcements are written."""

    async def say(self, said: Announcement, now: datetime) -> None:
        """Write it. Raises TransientError, PermanentError."""
        ...


class PolicyWatcher:
    """Judges policies against each other and the policy file. What it knows it reads again after a start."""

    name: ClassVar[str] = "policy_watcher"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact.domain() in _FOLDED_DOMAINS)
    publishes: ClassVar[tuple[type[Fact], ...]] = (PolicyDocumentsAccepted,)
    urgent: ClassVar[tuple[type[Fact], ...]] = (PolicyDocumentsAccepted,)  # then its answer is due
    tick_seconds: ClassVar[float | None] = 2.0
    starts_from_snapshot: ClassVar[bool] = False  # it opens no store

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        policies: Policies,
        events: Events,
        *,
        provider: str,
        say: Callable[[str], None],
    ) -> None:
        """`provider`: whom this system buys from. `say` is told in words what became of the definition."""
        self._view = view
        self._file = policy
        self._policies = policies
        self._events = events
        self._provider = provider
        self._say = say
        self._objects: dict[str, Policy] = {}  # by uid, as they are there
        self._is_listed = False
        self._trouble = ""  # with the definition; while there is any, nothing goes out of force
        self._mute = ""  # why nothing can be said on the objects; what is in force is so all the same
        self._accepted: tuple[PolicyDocument, ...] | None = None  # as judged last
        self._specs: dict[str, PolicySpec] = {}  # by uid, of what is in force
        self._written: dict[str, tuple[PolicyStatus, datetime]] = {}
        self._announced: dict[str, str] = {}  # uid -> words

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Judge under this policy file from now on."""
        self._file = policy

    # ---- seeing

    def sources(self) -> Sequence[AsyncIterator[WatchItem]]:
        """The watch of policies; where they are not defined it says that there are none, again and again."""
        return [self._policies.watch(POLICIES)]

    async def on_item(self, item: WatchItem) -> Outputs:
        """Take note; what follows from it is said with the next tick, when the state is known as well."""
        match item:
            case Listed():
                await self._on_listed(item)
            case Changed():
                self._objects[item.object.metadata.uid] = _policy(item)
            case Deleted():
                # Whoever deletes a definition deletes all its objects first, and means none of them.
                self._tell(await self._trouble_with_definition())
                if not self._trouble:
                    self._objects.pop(item.object.metadata.uid, None)
        return ()

    async def _on_listed(self, item: Listed) -> None:
        """All policies there are. None at all is believed only of a definition that stands, and stood before."""
        had_trouble, there = self._trouble, {one.metadata.uid: one for one in item.objects if isinstance(one, Policy)}
        is_less = not there.keys() >= self._objects.keys()
        self._tell(await self._trouble_with_definition() if item.version == 0 or is_less else "")
        if self._trouble or (had_trouble and not there):
            return
        self._objects, self._is_listed = there, True

    async def _trouble_with_definition(self) -> str:
        """Why policies cannot be seen; empty: they can."""
        try:
            found = await self._policies.read(DEFINITION_PATH)
        except NotFound:
            return "is not installed; kubectl apply -f deploy/charts/gpu-autoscaler/crds"
        except PermanentError as exc:
            log.warning("definition of policies not readable, it is taken to stand", error=str(exc))
            return ""
        if found["metadata"].get("deletionTimestamp"):
            return "is being deleted"
        served = [each["name"] for each in found["spec"]["versions"] if each["served"]]
        if VERSION not in served:
            return f"serves {', '.join(served) or 'no version'} and not {VERSION}; install the one of this release"
        return ""

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            if trouble:
                log.warning("policies are not to be seen, the last good ones stay in force", definition=trouble)
            else:
                log.info("policies are to be seen again")
        self._trouble = trouble
        words = f"{DEFINITION} {trouble or self._mute}" if trouble or self._mute else f"{len(self._objects)} policies"
        self._say(f"{words}; {len(self._in_force())} in force")

    # ---- judging

    async def on_tick(self, now: datetime) -> Outputs:
        """Say what is in force where the stream has it otherwise; answer on the objects."""
        if not self._is_listed:
            return ()
        resolution, unreadable = self._judge()
        self._accepted = resolution.accepted
        known = self._view.state.policy_documents
        is_old = known is not None and now - known.accepted_at > SAID_AGAIN_AFTER
        if is_old or resolution.accepted != (() if known is None else known.documents):
            last = datetime.min.replace(tzinfo=now.tzinfo) if known is None else known.accepted_at
            # The last word counts by its instant, and a clock may have been set back.
            at = max(now, last + timedelta(microseconds=1))
            log.info("policies in force", names=[f"{each.name}@{each.generation}" for each in resolution.accepted])
            return (PolicyDocumentsAccepted(documents=resolution.accepted, accepted_at=at),)
        await self._answer({**resolution.refused, **unreadable}, now)
        return ()

    def _in_force(self) -> tuple[PolicyDocument, ...]:
        """What was accepted last: as remembered, as the stream has it, or as the objects themselves tell."""
        if self._accepted is not None:
            return self._accepted
        known = self._view.state.policy_documents
        return tuple(filter(None, map(_told_of, self._objects.values()))) if known is None else known.documents

    def _judge(self) -> tuple[DocumentResolution, dict[str, tuple[str, ...]]]:
        documents: list[PolicyDocument] = []
        unreadable: dict[str, tuple[str, ...]] = {}
        before = {each.uid: each for each in self._in_force()}
        specs: dict[str, PolicySpec] = {}
        for uid, one in self._objects.items():
            try:
                specs[uid] = spec_of(one)
                documents.append(document(one, specs[uid], one.metadata.generation))
            except PermanentError as exc:
                unreadable[uid] = (str(exc),)
                if uid in before:
                    documents.append(before[uid])
        resolution = resolve_documents(documents, before.values(), self._file, self._provider)
        for each in resolution.accepted:
            if each.uid in specs and each.generation == self._objects[each.uid].metadata.generation:
                self._specs[each.uid] = specs[each.uid]
        return resolution, unreadable

    # ---- answering

    async def _answer(self, refused: Mapping[str, tuple[str, ...]], now: datetime) -> None:
        """Write what is new to each object, and an Event where the resolution is. Another try comes with each tick."""
        in_force = {each.uid: each for each in self._in_force()}
        self._written = {uid: each for uid, each in self._written.items() if uid in self._objects}
        for uid, one in self._objects.items():
            before = self._written[uid][0] if uid in self._written else status_of(one)
            generation, why = one.metadata.generation, refused.get(uid, ())
            status = told(
                before, generation, in_force.get(uid), self._specs.get(uid, before.in_force), why, self._view.state, now
            )
            try:
                await self._write(one, before, status, now)
                await self._announce(one, status, now)
            except TransientError as exc:
                log.warning("status of policies not written, tried again", error=str(exc))
                return
            except NotFound:  # it goes, and the watch will say so; or there is no such place
                await self._look_for_status()
            except PermanentError as exc:
                log.warning("status of a policy not written", policy=one.metadata.name, error=str(exc))

    async def _look_for_status(self) -> None:
        """Say it where the definition lets nothing be said on its objects. Tried again with the next tick."""
        try:
            found = await self._policies.read(DEFINITION_PATH)
        except (NotFound, PermanentError, TransientError):
            return  # what is wrong with it is told with the next list
        ours: Mapping[str, Any] = next((each for each in found["spec"]["versions"] if each["name"] == VERSION), {})
        has_status = "status" in ours.get("subresources", {})
        mute = (
            ""
            if has_status
            else "has no status, so nothing can be told on its objects; install the one of this release"
        )
        if mute != self._mute:
            self._mute = mute
            self._tell(self._trouble)

    async def _write(self, one: Policy, before: PolicyStatus, status: PolicyStatus, now: datetime) -> None:
        written = self._written.get(one.metadata.uid)
        if status == before and written is not None:
            return
        is_due = written is None or now - written[1] >= FIGURES_AFTER
        if not is_due and status.conditions == before.conditions and status.pools == before.pools:
            return
        body = msgspec.to_builtins(status)  # a None takes away what stood there: that is what a merge patch does
        await self._policies.patch(f"{POLICIES.path('', one.metadata.name)}/status", {"status": body})
        self._written[one.metadata.uid], self._mute = (status, now), ""

    async def _announce(self, one: Policy, status: PolicyStatus, now: datetime) -> None:
        """`PolicyAccepted` or `PolicyRefused`, once for each resolution."""
        accepted, ready = status.conditions
        is_refused = accepted.status == "False"
        words = f"{accepted.message}; {ready.message}" if is_refused else ready.message
        if self._announced.get(one.metadata.uid) == words:
            return
        said = Announcement(
            kind="AutoscalingPolicy",
            namespace="",
            name=one.metadata.name,
            uid=one.metadata.uid,
            reason="PolicyRefused" if is_refused else "PolicyAccepted",
            message=words[:MESSAGE_LENGTH_MAX],
            is_warning=is_refused,
        )
        await self._events.say(said, now)
        self._announced[one.metadata.uid] = words


def _policy(item: Changed) -> Policy:
    assert isinstance(item.object, Policy)  # noqa: S101 - the watch is of that kind
    return item.object


def _told_of(one: Policy) -> PolicyDocument | None:
    """What the object itself says is in force of it: for when all streams are lost."""
    status, generation = status_of(one), one.metadata.generation
    if status.generation_in_force is None:
        return None
    try:
        spec = spec_of(one) if status.generation_in_force == generation else status.in_force
    except PermanentError:
        spec = None
    return None if spec is None else document(one, spec, status.generation_in_force)
