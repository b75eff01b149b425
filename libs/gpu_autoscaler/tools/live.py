"""Buys one instance of a real cloud and walks the contract of providers with it: what no fake can show.

`LiveCheck.run` goes through the promises of `providers/protocol.py` in the order of an instance's life, says what each
step found and how long it took, and ends whatever it has bought, also when a step fails, hangs or is interrupted. It
acts on instances of its own action id alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

import msgspec

from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.providers.findings import Finding, warning, error, ok
from gpu_autoscaler.providers.protocol import (
    CapacityProvider,
    ReplacesInstances,
    Instance,
    LaunchRefused,
    Order,
    RefusalKind,
    DescribesInstance,
)
from gpu_autoscaler.runtime.clock import Clock

T = TypeVar("T")

_AFTER_REFUSAL: dict[RefusalKind, str] = {
    "capacity": "none is left of it here now: try again with another --offer",
    "quota": "ask for a larger quota, or try another --offer",
    "permission": "allow what it names; `gpu-autoscaler doctor --policy` prints all that is needed",
    "configuration": "change the setting, template or group that it names",
}
_REFUSED_MAX = 5  # times that an end is refused for good before somebody is called
_REPORT = "a driver counts on it: report it with this output, and do not let the scaler buy here until it is mended"


class LiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long anything is waited for, in seconds of the clock but for the call's."""

    call_wall_seconds_max: float = 180.0  # of one call of the driver, beside its own limits
    answer_seconds_max: float = 180.0  # while the cloud cannot be reached or throttles, before a step is given up
    # From a launch until lists show it. Source: our own; EC2 asks callers to allow for minutes (Amazon EC2 API
    # reference, "Eventual consistency").
    shown_seconds_max: float = 300.0
    ended_seconds_max: float = 900.0  # from the end's beginning until the cloud tells it; a GPU machine takes minutes
    poll_seconds: float = 5.0


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the walk found, and what it could not end: by id, or None for an instance that may be there unseen."""

    steps: tuple[Finding, ...]
    left: tuple[ProviderId | None, ...]
    is_interrupted: bool


class _Interrupted(Exception):
    """Somebody asked the walk to stop."""


class _Broken(Exception):
    """A step found something else than the contract says; its text says what."""


class LiveCheck:
    """One walk. `open_driver` opens the real driver, also a second one, which remembers nothing."""

    def __init__(
        self,
        open_driver: Callable[[], CapacityProvider],
        order: Order,
        clock: Clock,
        say: Callable[[Finding], None],
        limits: LiveLimits | None = None,
    ) -> None:
        """`order` carries a fresh action id; `say` hears of each step as it ends."""
        self._open_driver = open_driver
        self._order = order
        self._clock = clock
        self._say = say
        self._limits = limits or LiveLimits()
        self._interrupted = asyncio.Event()
        self._steps: list[Finding] = []
        self._driver = open_driver()
        self._is_asked = False  # a launch was sent: from then on something may be there
        self._asked_at: datetime | None = None
        self._is_refused = False  # and nothing was made
        self._bought: dict[ProviderId, bool] = {}  # whether the cloud has shown it
        self._over: set[ProviderId] = set()

    def interrupt(self) -> None:
        """Stop at the next point where nothing is under way, and end what was bought."""
        self._interrupted.set()

    async def run(self) -> LiveReport:
        """Walk, then end what is left of it. Cancelling it is the only way to leave something behind unsaid."""
        try:
            try:
                await self._walk()
            except _Interrupted:
                self._tell(warning("live: interrupted", "stopped", "wait: what was bought is being ended"))
            finally:
                left = await self._clear()
        finally:
            await self._driver.close()
        return LiveReport(steps=tuple(self._steps), left=left, is_interrupted=self._interrupted.is_set())

    @property
    def not_ended(self) -> tuple[ProviderId | None, ...]:
        """What may be there now: by id, None for an instance that was asked for and that nobody has shown."""
        if not self._is_asked or self._is_over():
            return ()
        return (*sorted(self._bought.keys() - self._over),) or (None,)

    # ---- the steps

    async def _walk(self) -> None:
        if not await self._step("launch", self._launch, "see the error; `gpu-autoscaler doctor` looks at the set-up"):
            await self._step("nothing left", self._nothing_left, _REPORT)
            return
        await self._step("same token again", self._launch_again, _REPORT)
        await self._step("in the list", self._listed, _REPORT)
        await self._step("asked for alone", self._alone, _REPORT)
        await self._step("price", self._price, _REPORT)
        await self._step("out of its group", self._detached, _REPORT)
        if await self._step("end", self._end, "allow it; `gpu-autoscaler doctor --policy` prints all that is needed"):
            await self._step("end again", self._end, _REPORT)
            await self._step("told as ended", self._ended, "look at the instance in the cloud's own list")
        await self._step("nothing left", self._nothing_left, _REPORT)

    async def _step(self, name: str, walk: Callable[[], Awaitable[str]], next_step: str) -> bool:
        """Do one step and tell it; False where it failed. Raises _Interrupted between calls."""
        if self._interrupted.is_set():
            raise _Interrupted
        began, subject = self._clock.now(), f"live: {name}"
        try:
            said = await walk()
        except LaunchRefused as exc:
            self._is_refused = True
            found = error(subject, f"refused: {exc}", _AFTER_REFUSAL[exc.kind])
        except TransientError as exc:
            found = error(subject, str(exc), "see that the cloud can be reached, then try again")
        except (_Broken, AutoscalerError) as exc:
            found = error(subject, str(exc), next_step)
        else:
            found = ok(subject, said)
        self._tell(msgspec.structs.replace(found, said=f"{found.said} ({self._seconds_since(began):.1f} s)"))
        return found.level != "error"

    async def _launch(self) -> str:
        self._is_asked, self._asked_at = True, self._clock.now()
        made = await self._answered(lambda: self._driver.launch(self._order))
        self._bought.setdefault(made.provider_id, False)
        return f"{made.provider_id}, {made.state}"

    async def _launch_again(self) -> str:
        first = set(self._bought)
        again = await self._answered(lambda: self._driver.launch(self._order))
        self._bought.setdefault(again.provider_id, False)
        if again.provider_id not in first:
            raise _Broken(f"the same token bought another one, {again.provider_id}; both are ended")
        return "the same instance, nothing bought twice"

    async def _listed(self) -> str:
        async def look() -> str | None:
            ours = await self._ours(self._driver)
            if not all(self._bought.values()):
                return None
            if len(ours) > 1:
                raise _Broken(f"{len(ours)} instances carry this action id; all of them are ended")
            (one,) = ours
            return f"listed with our tags, {one.state}, {self._since_asked():.0f} s after it was asked for"

        return await self._waited(look, self._limits.shown_seconds_max, "no list shows it with our tags")

    async def _alone(self) -> str:
        driver = self._driver
        if not isinstance(driver, DescribesInstance):
            return "this driver cannot be asked about one"

        async def look() -> str | None:
            found = [await self._called(partial(driver.instance, one)) for one in self._bought]
            if any(one is not None and one.action_id not in (None, self._order.action_id) for one in found):
                raise _Broken("it carries another action id than it was ordered with")
            return None if None in found else f"told by its name, {self._since_asked():.0f} s after it was asked for"

        return await self._waited(look, self._limits.shown_seconds_max, "asked for by its name, the cloud knows none")

    async def _price(self) -> str:
        told = {one.price_micro_usd_per_hour for one in await self._answered(lambda: self._ours(self._driver))}
        if not told:
            raise _Broken("no list shows it, with a price or without")
        agreed = self._order.offer.price_micro_usd_per_hour
        if told != {agreed}:
            raise _Broken(f"its price is told as {sorted(map(str, told))} micro-dollars an hour, and not as {agreed}")
        return "as it was agreed"

    async def _detached(self) -> str:
        driver = self._driver
        if not isinstance(driver, ReplacesInstances):
            return "not needed: nothing here replaces what ends"
        for one in (*self._bought, *self._bought):  # twice is no error
            await self._answered(partial(driver.detach, one))
        return "nothing will replace it when it ends"

    async def _end(self) -> str:
        states = []
        for one in self._bought:
            ending = await self._answered(partial(self._driver.terminate, one, now=self._clock.now()))
            if ending is not None and ending.state not in ("terminating", "terminated"):
                raise _Broken(f"told to end, it is {ending.state}")
            self._bought[one] |= ending is not None
            states.append("gone" if ending is None else ending.state)
        return ", ".join(states)

    async def _ended(self) -> str:
        began = self._clock.now()

        async def look() -> str | None:
            await self._see_ended(self._driver)
            return (
                None
                if self._bought.keys() - self._over
                else f"{self._seconds_since(began):.0f} s after its end was asked for"
            )

        return await self._waited(look, self._limits.ended_seconds_max, "it is not told as ended")

    async def _nothing_left(self) -> str:
        """Ask a driver that has just been opened, as a process would after a restart."""
        fresh = self._open_driver()
        try:
            living = [
                one.provider_id
                for one in await self._answered(lambda: self._ours(fresh))
                if one.state not in ("terminating", "terminated")
            ]
        finally:
            await fresh.close()
        if living:
            raise _Broken(f"still there: {', '.join(living)}")
        return "a driver that has just started lists nothing of it that lives"

    # ---- ending what is left

    async def _clear(self) -> tuple[ProviderId | None, ...]:
        """End everything of this action id; returns what could not be ended."""
        began, refused_count, heard = self._clock.now(), 0, ""
        is_told = bool(self.not_ended)
        while self.not_ended:
            try:
                await self._end_all()
            except AutoscalerError as exc:
                heard = f"; last error: {exc}"
                refused_count += isinstance(exc, PermanentError)
            else:
                heard, refused_count = "", 0
            left = self.not_ended
            if left and (refused_count >= _REFUSED_MAX or self._seconds_since(began) >= self._limits.ended_seconds_max):
                names = ", ".join(one or f"an instance of action id {self._order.action_id}" for one in left)
                self._tell(error("live: NOT ENDED", f"{names} may still run, and cost{heard}", "end it by hand, now"))
                return left
            if left:
                await self._clock.sleep(self._limits.poll_seconds)
        if is_told:
            self._tell(ok("live: ended", ", ".join(sorted(self._bought)) or "nothing had been made"))
        return ()

    async def _end_all(self) -> None:
        """End what was bought. Of a launch that was never answered the token tells: it makes no second instance."""
        await self._ours(self._driver)
        if not self._bought:
            try:
                made = await self._called(lambda: self._driver.launch(self._order))
            except LaunchRefused:
                self._is_refused = True
                return
            self._bought[made.provider_id] = False
        for one in sorted(self._bought.keys() - self._over):
            ending = await self._called(partial(self._driver.terminate, one, now=self._clock.now()))
            self._bought[one] |= ending is not None
        await self._see_ended(self._driver)

    def _is_over(self) -> bool:
        """Whether everything bought has ended, or nothing was made."""
        return self._bought.keys() <= self._over if self._bought else self._is_refused

    async def _see_ended(self, driver: CapacityProvider) -> None:
        """Note which of the bought instances the cloud tells as ended. One that it never showed proves nothing."""
        listed = {one.provider_id: one for one in await self._ours(driver)}
        for one in self._bought.keys() - self._over:
            shown = listed.get(one)
            if isinstance(driver, DescribesInstance) and shown is None:
                shown = await self._called(partial(driver.instance, one))
            if (shown is None and self._bought[one]) or (shown is not None and shown.state == "terminated"):
                self._over.add(one)

    async def _ours(self, driver: CapacityProvider) -> Sequence[Instance]:
        """Return what the list shows of this action id, and remember it as bought."""
        listed = await self._called(lambda: driver.instances(self._order.installation))
        found = [one for one in listed if one.action_id == self._order.action_id or one.provider_id in self._bought]
        self._bought |= {one.provider_id: True for one in found}
        return found

    # ---- waiting

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the answer, asked again while the cloud cannot give one. Raises what the call does."""
        began = self._clock.now()
        while True:
            try:
                return await self._called(call)
            except TransientError:
                if self._seconds_since(began) >= self._limits.answer_seconds_max:
                    raise
            await self._pause()

    async def _waited(self, look: Callable[[], Awaitable[str | None]], seconds_max: float, missed: str) -> str:
        """Return what `look` found, asked again until it finds something. Raises _Broken at the limit."""
        began, heard = self._clock.now(), ""
        while True:
            try:
                found = await look()
            except TransientError as exc:
                found, heard = None, f"; last error: {exc}"
            if found is not None:
                return found
            if self._seconds_since(began) >= seconds_max:
                raise _Broken(f"{missed} within {seconds_max:g} s{heard}")
            await self._pause()

    async def _called(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call within the limit of wall time. Never broken off by an interruption: a launch is heard to its end."""
        limit = self._limits.call_wall_seconds_max
        try:
            async with asyncio.timeout(limit):
                return await call()
        except TimeoutError as exc:
            raise TransientError(f"no answer within {limit:g} s; the same call may be made again") from exc

    async def _pause(self) -> None:
        """Wait for the next try. Raises _Interrupted as soon as somebody asks to stop."""
        waits = [asyncio.ensure_future(self._interrupted.wait())]
        waits.append(asyncio.ensure_future(self._clock.sleep(self._limits.poll_seconds)))  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        if self._interrupted.is_set():
            raise _Interrupted

    def _since_asked(self) -> float:
        return 0.0 if self._asked_at is None else self._seconds_since(self._asked_at)

    def _seconds_since(self, began: datetime) -> float:
        return (self._clock.now() - began).total_seconds()

    def _tell(self, found: Finding) -> None:
        self._steps.append(found)
        self._say(found)
