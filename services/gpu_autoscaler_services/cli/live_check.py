"""Buy one instance of a real cloud and test the driver's contract with it, which no fake can prove.

`LiveCheck.run` checks the contract of `providers/protocol.py` in the order of an instance's life, reports each step
with its duration, and terminates everything it bought, even when a step fails, hangs or is interrupted. It acts only on
instances of its own action id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import msgspec

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.providers import protocol
from gpu_autoscaler.providers.preflight import Finding, error, ok, warning
from gpu_autoscaler.runtime.clock import Clock

T = TypeVar("T")

_AFTER_REFUSAL: dict[protocol.RefusalKind, str] = {
    "capacity": "the zone is out of capacity: retry with another --offer",
    "quota": "request a quota increase, or retry with another --offer",
    "permission": "grant the permission; gpu-autoscaler doctor --policy prints all required permissions",
    "configuration": "correct the named setting, template or group",
}
_REFUSED_MAX = 5  # permanent errors of a termination before the check reports the instance as not terminated
_REPORT = "the driver violates its contract: report this output, and do not let the scaler buy here until it is fixed"


class LiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, in seconds of cluster time except for calls."""

    call_wall_seconds_max: float = 180.0  # per driver call, in addition to its own limits
    answer_seconds_max: float = 180.0  # of unreachability or throttling before a step fails
    # From launch until listed. Our choice; EC2 asks callers to allow minutes (Amazon EC2 API Reference, "Eventual
    # consistency").
    shown_seconds_max: float = 300.0
    ended_seconds_max: float = 900.0  # from termination request to reported end; GPU machines take minutes
    poll_seconds: float = 5.0


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the steps, and instances not terminated: by id, or None for one that may exist unlisted."""

    steps: tuple[Finding, ...]
    left: tuple[ProviderId | None, ...]
    is_interrupted: bool


class _Interrupted(Exception):
    """The user interrupted the check."""


class _ContractViolated(Exception):
    """The driver's behavior differs from its contract; the message states how."""


class LiveCheck:
    """One check. `open_driver` opens the real driver; it is called again for a driver without memory."""

    def __init__(
        self,
        open_driver: Callable[[], protocol.CapacityProvider],
        order: protocol.Order,
        clock: Clock,
        report: Callable[[Finding], None],
        limits: LiveLimits | None = None,
    ) -> None:
        """`order` has a new action id; `report` is called with each step as it ends."""
        self._open_driver = open_driver
        self._order = order
        self._clock = clock
        self._report = report
        self._limits = limits or LiveLimits()
        self._interrupted = asyncio.Event()
        self._steps: list[Finding] = []
        self._driver = open_driver()
        self._is_asked = False  # a launch was sent: an instance may exist from now on
        self._asked_at: datetime | None = None
        self._is_refused = False  # refused, so no instance exists
        self._bought: dict[ProviderId, bool] = {}  # id -> listed by the cloud
        self._ended_ids: set[ProviderId] = set()

    def interrupt(self) -> None:
        """Stop after the call in progress and terminate what was bought."""
        self._interrupted.set()

    async def run(self) -> LiveReport:
        """Run the steps, then terminate the rest. Only cancellation can leave an instance unreported."""
        try:
            try:
                await self._run_steps()
            except _Interrupted:
                self._record(warning("live: interrupted", "check stopped", "wait: the instance is being terminated"))
            finally:
                left = await self._clean_up()
        finally:
            await self._driver.close()
        return LiveReport(steps=tuple(self._steps), left=left, is_interrupted=self._interrupted.is_set())

    @property
    def not_ended(self) -> tuple[ProviderId | None, ...]:
        """Return instances that may exist: by id, None for a launch without a known instance."""
        if not self._is_asked or self._is_over():
            return ()
        return (*sorted(self._bought.keys() - self._ended_ids),) or (None,)

    # ---- steps

    async def _run_steps(self) -> None:
        if not await self._step("launch", self._launch, "correct the cause, then run gpu-autoscaler doctor"):
            await self._step("no instance left", self._nothing_left, _REPORT)
            return
        await self._step("repeat with the same token", self._repeat_launch, _REPORT)
        await self._step("listed", self._listed, _REPORT)
        await self._step("described by id", self._described, _REPORT)
        await self._step("price", self._price, _REPORT)
        await self._step("detached from its group", self._detached, _REPORT)
        if await self._step("terminate", self._terminate, _AFTER_REFUSAL["permission"]):
            await self._step("repeat terminate", self._terminate, _REPORT)
            await self._step("reported as terminated", self._ended, "check the instance in the cloud's console")
        await self._step("no instance left", self._nothing_left, _REPORT)

    async def _step(self, name: str, action: Callable[[], Awaitable[str]], next_step: str) -> bool:
        """Run and report one step; return False if it failed. Raises _Interrupted between calls."""
        if self._interrupted.is_set():
            raise _Interrupted
        began, subject = self._clock.now(), f"live: {name}"
        try:
            text = await action()
        except protocol.LaunchRefused as exc:
            self._is_refused = True
            finding = error(subject, f"refused: {exc}", _AFTER_REFUSAL[exc.kind])
        except TransientError as exc:
            finding = error(subject, str(exc), "check that the cloud API is reachable, then retry")
        except (_ContractViolated, AutoscalerError) as exc:
            finding = error(subject, str(exc), next_step)
        else:
            finding = ok(subject, text)
        self._record(
            msgspec.structs.replace(finding, message=f"{finding.message} ({self._seconds_since(began):.1f} s)")
        )
        return finding.level != "error"

    async def _launch(self) -> str:
        self._is_asked, self._asked_at = True, self._clock.now()
        instance = await self._answered(lambda: self._driver.launch(self._order))
        self._bought.setdefault(instance.provider_id, False)
        return f"{instance.provider_id}, {instance.state}"

    async def _repeat_launch(self) -> str:
        first = set(self._bought)
        second = await self._answered(lambda: self._driver.launch(self._order))
        self._bought.setdefault(second.provider_id, False)
        if second.provider_id not in first:
            raise _ContractViolated(f"the same token bought a second instance, {second.provider_id}; terminating both")
        return "same instance returned, no second purchase"

    async def _listed(self) -> str:
        async def look() -> str | None:
            ours = await self._ours(self._driver)
            if not all(self._bought.values()):
                return None
            if len(ours) > 1:
                raise _ContractViolated(f"{len(ours)} instances have this action id; terminating all of them")
            (instance,) = ours
            return f"listed with our tags, {instance.state}, {self._since_asked():.0f} s after the launch request"

        return await self._waited(look, self._limits.shown_seconds_max, "not listed with our tags")

    async def _described(self) -> str:
        driver = self._driver
        if not isinstance(driver, protocol.DescribesInstance):
            return "not supported by this driver"

        async def look() -> str | None:
            instances = [await self._called(partial(driver.instance, provider_id)) for provider_id in self._bought]
            if any(instance and instance.action_id not in (None, self._order.action_id) for instance in instances):
                raise _ContractViolated("its action id differs from the one of the order")
            return None if None in instances else f"found, {self._since_asked():.0f} s after the launch request"

        return await self._waited(look, self._limits.shown_seconds_max, "not found by its id")

    async def _price(self) -> str:
        prices = {
            instance.price_micro_usd_per_hour for instance in await self._answered(lambda: self._ours(self._driver))
        }
        if not prices:
            raise _ContractViolated("not listed, so its price is unknown")
        agreed = self._order.offer.price_micro_usd_per_hour
        if prices != {agreed}:
            listed = sorted(map(str, prices))
            raise _ContractViolated(f"listed at {listed} micro-dollars per hour, but ordered at {agreed}")
        return "as ordered"

    async def _detached(self) -> str:
        driver = self._driver
        if not isinstance(driver, protocol.ReplacesInstances):
            return "not needed: this driver's groups do not replace instances"
        for provider_id in (*self._bought, *self._bought):  # repeating it is no error
            await self._answered(partial(driver.detach, provider_id))
        return "its group will not replace it"

    async def _terminate(self) -> str:
        states = []
        for provider_id in self._bought:
            ending = await self._answered(partial(self._driver.terminate, provider_id, now=self._clock.now()))
            if ending is not None and ending.state not in ("terminating", "terminated"):
                raise _ContractViolated(f"its state is {ending.state} after the termination request")
            self._bought[provider_id] |= ending is not None
            states.append("gone" if ending is None else ending.state)
        return ", ".join(states)

    async def _ended(self) -> str:
        began = self._clock.now()

        async def look() -> str | None:
            await self._note_ended(self._driver)
            is_pending = bool(self._bought.keys() - self._ended_ids)
            return None if is_pending else f"{self._seconds_since(began):.0f} s after the termination request"

        return await self._waited(look, self._limits.ended_seconds_max, "not reported as terminated")

    async def _nothing_left(self) -> str:
        """Check with a newly opened driver, as after a restart."""
        fresh = self._open_driver()
        try:
            living = [
                instance.provider_id
                for instance in await self._answered(lambda: self._ours(fresh))
                if instance.state not in ("terminating", "terminated")
            ]
        finally:
            await fresh.close()
        if living:
            raise _ContractViolated(f"still running: {', '.join(living)}")
        return "a newly started driver lists no running instance of this check"

    # ---- cleaning up

    async def _clean_up(self) -> tuple[ProviderId | None, ...]:
        """Terminate everything of this action id; return what could not be terminated."""
        began, refused_count, last_error = self._clock.now(), 0, ""
        had_instances = bool(self.not_ended)
        while self.not_ended:
            try:
                await self._terminate_all()
            except AutoscalerError as exc:
                last_error = f"; last error: {exc}"
                refused_count += isinstance(exc, PermanentError)
            else:
                last_error, refused_count = "", 0
            left = self.not_ended
            if left and (refused_count >= _REFUSED_MAX or self._seconds_since(began) >= self._limits.ended_seconds_max):
                names = ", ".join(name or f"an instance of action id {self._order.action_id}" for name in left)
                self._record(error("live: NOT TERMINATED", f"{names} may run and cost{last_error}", "terminate it now"))
                return left
            if left:
                await self._clock.sleep(self._limits.poll_seconds)
        if had_instances:
            self._record(ok("live: terminated", ", ".join(sorted(self._bought)) or "no instance was created"))
        return ()

    async def _terminate_all(self) -> None:
        """Terminate what was bought. An unanswered launch is repeated with its token to learn the instance's id."""
        await self._ours(self._driver)
        if not self._bought:
            try:
                instance = await self._called(lambda: self._driver.launch(self._order))
            except protocol.LaunchRefused:
                self._is_refused = True
                return
            self._bought[instance.provider_id] = False
        for provider_id in sorted(self._bought.keys() - self._ended_ids):
            ending = await self._called(partial(self._driver.terminate, provider_id, now=self._clock.now()))
            self._bought[provider_id] |= ending is not None
        await self._note_ended(self._driver)

    def _is_over(self) -> bool:
        """Return whether everything bought is terminated, or the launch was refused."""
        return self._bought.keys() <= self._ended_ids if self._bought else self._is_refused

    async def _note_ended(self, driver: protocol.CapacityProvider) -> None:
        """Note which bought instances the cloud reports as terminated. Absence counts only after it was listed once."""
        listed = {instance.provider_id: instance for instance in await self._ours(driver)}
        for provider_id in self._bought.keys() - self._ended_ids:
            instance = listed.get(provider_id)
            if isinstance(driver, protocol.DescribesInstance) and instance is None:
                instance = await self._called(partial(driver.instance, provider_id))
            if self._bought[provider_id] if instance is None else instance.state == "terminated":
                self._ended_ids.add(provider_id)

    async def _ours(self, driver: protocol.CapacityProvider) -> Sequence[protocol.Instance]:
        """Return the listed instances of this action id, and remember them as bought."""
        listed = await self._called(lambda: driver.instances(self._order.installation))
        ours = [
            instance
            for instance in listed
            if instance.action_id == self._order.action_id or instance.provider_id in self._bought
        ]
        self._bought |= {instance.provider_id: True for instance in ours}
        return ours

    # ---- waiting

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call, with retries of transient errors up to the limit. Raises what the call raises."""
        began = self._clock.now()
        while True:
            try:
                return await self._called(call)
            except TransientError:
                if self._seconds_since(began) >= self._limits.answer_seconds_max:
                    raise
            await self._pause()

    async def _waited(self, look: Callable[[], Awaitable[str | None]], seconds_max: float, missed: str) -> str:
        """Poll `look` until it returns a result. Raises _ContractViolated at the limit."""
        began, last_error = self._clock.now(), ""
        while True:
            try:
                result = await look()
            except TransientError as exc:
                result, last_error = None, f"; last error: {exc}"
            if result is not None:
                return result
            if self._seconds_since(began) >= seconds_max:
                raise _ContractViolated(f"{missed} within {seconds_max:g} s{last_error}")
            await self._pause()

    async def _called(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call within the limit of wall time. An interruption does not cancel it: a launch is awaited to its end."""
        limit = self._limits.call_wall_seconds_max
        try:
            async with asyncio.timeout(limit):
                return await call()
        except TimeoutError as exc:
            raise TransientError(f"no answer within {limit:g} s; the call may be repeated") from exc

    async def _pause(self) -> None:
        """Wait before the next attempt. Raises _Interrupted as soon as the user interrupts."""
        waits = [asyncio.ensure_future(self._interrupted.wait())]
        waits.append(asyncio.ensure_future(self._clock.sleep(self._limits.poll_seconds)))  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._interrupted.is_set():
            raise _Interrupted

    def _since_asked(self) -> float:
        return 0.0 if self._asked_at is None else self._seconds_since(self._asked_at)

    def _seconds_since(self, began: datetime) -> float:
        return (self._clock.now() - began).total_seconds()

    def _record(self, finding: Finding) -> None:
        self._steps.append(finding)
        self._report(finding)
