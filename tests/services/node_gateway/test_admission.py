"""Questions about logins are answered a few at a time; what the broker no longer waits for is dropped.

Who gets in is tested on a real broker (tests/integration/bus/test_auth_callout.py) and API server.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from gpu_autoscaler.bus.nats.auth_callout import Issuer, new_issuer_seed
from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.kube.protocol import Kind, ObjectT
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler_services.node_gateway import admission
from gpu_autoscaler_services.node_gateway.admission import LOGINS_AT_ONCE_MAX, LOGINS_WAITING_MAX, Admission, Callout


class HangingApi:
    """An API server that answers no review before it is released, and then fails."""

    def __init__(self) -> None:
        self.reviewed_count = 0
        self.released = asyncio.Event()

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002 - all are alike
        """Review a token."""
        self.reviewed_count += 1
        await self.released.wait()
        raise TransientError("API server away")

    async def get(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT:  # noqa: ARG002 - never called
        """Read a node: no token is accepted."""
        raise AssertionError


class Desk:
    """A callout and what comes of its questions."""

    def __init__(self) -> None:
        self.api, self.outcomes, self.answers_count = HangingApi(), list[str](), 0
        self.callout = Callout(
            Admission(self.api, account="watcher"),
            Issuer(new_issuer_seed()),
            wall_now=lambda: datetime(2026, 11, 23, tzinfo=UTC),
            life_share=lambda: 1.0,
            on_outcome=self.outcomes.append,
        )

    def ask(self, count: int) -> None:
        """Let the broker ask about as many logins."""
        question = {
            "server_id": {"id": "N"}, "user_nkey": "U", "client_info": {}, "connect_opts": {"auth_token": "t"},
        }  # fmt: skip
        claims = base64.urlsafe_b64encode(json.dumps({"nats": question}).encode()).rstrip(b"=")
        for _ in range(count):
            self.callout.receive(Request(subject="", payload=b"e30." + claims + b".e30", answer=self._answer))

    async def _answer(self, _: bytes) -> None:
        self.answers_count += 1

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answer meanwhile."""
        task = asyncio.create_task(self.callout.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_few_logins_are_reviewed_at_once() -> None:
    """A thousand watchers that come together do not flood the API server; each gets an answer."""
    desk = Desk()
    desk.ask(2 * LOGINS_AT_ONCE_MAX)
    async with desk.answering():
        await _settle()
        assert desk.api.reviewed_count == LOGINS_AT_ONCE_MAX
        desk.api.released.set()
        await _settle()
    assert desk.outcomes == ["failed"] * 2 * LOGINS_AT_ONCE_MAX
    assert desk.answers_count == 2 * LOGINS_AT_ONCE_MAX


async def test_waiting_logins_are_limited() -> None:
    """What exceeds the limit is dropped: its watcher tries again."""
    desk = Desk()
    desk.ask(LOGINS_WAITING_MAX + 5)
    assert desk.outcomes == ["dropped"] * 5


async def test_a_login_that_the_broker_gave_up_is_not_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer would come too late; the API server is spared."""
    monkeypatch.setattr(admission, "CALLOUT_SECONDS_MAX", 0)
    desk = Desk()
    desk.ask(3)
    async with desk.answering():
        await _settle()
    assert (desk.outcomes, desk.api.reviewed_count, desk.answers_count) == (["dropped"] * 3, 0, 0)
