"""REST calls to clouds: results, errors and retries."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.providers.rest import Answer, RestClient, error_text
from gpu_autoscaler.providers.throttling import RateLimit

Handler = Callable[[web.Request], Awaitable[web.Response]]


async def _token() -> str:
    return "secret"


@asynccontextmanager
async def asked(handler: Handler, *, call_seconds_max: float = 30.0) -> AsyncIterator[Callable[[], Awaitable[Answer]]]:
    """Yields a call to a server that answers by `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    calls = RestClient(_token, call_seconds_max=call_seconds_max)
    rate_limit = RateLimit(100.0, 100)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/thing"
    try:
        query, body = {"zone": "a"}, {"name": "x"}
        yield lambda: calls.call("things.make", "POST", url, rate_limit=rate_limit, query=query, body=body)
    finally:
        await calls.close()
        await runner.cleanup()


async def test_a_response_has_status_and_body() -> None:
    """Token, query and JSON body are sent; an error response is returned for the driver to read."""

    async def refuse(request: web.Request) -> web.Response:
        sent = {"token": request.headers["Authorization"], "zone": request.query["zone"], **await request.json()}
        return web.json_response({"error": {"message": "no", "sent": sent}}, status=409)

    async with asked(refuse) as call:
        answer = await call()
    assert (answer.status, answer.is_success, error_text(answer)) == (409, False, "no")
    assert answer.body["error"]["sent"] == {"token": "Bearer secret", "zone": "a", "name": "x"}


@pytest.mark.parametrize(("status", "wait_seconds"), [(429, 7.0), (500, 7.0), (503, 7.0)])
async def test_server_errors_are_transient(status: int, wait_seconds: float) -> None:
    """With the cloud's Retry-After and message."""

    async def trouble(_: web.Request) -> web.Response:
        return web.Response(status=status, text="overloaded", headers={"Retry-After": "7"})

    async with asked(trouble) as call:
        with pytest.raises(TransientError, match="overloaded") as told:
            await call()
    assert told.value.retry_after_seconds == wait_seconds


async def test_a_call_without_an_answer_times_out() -> None:
    """The call may have succeeded; it is safe to retry."""

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with asked(hang, call_seconds_max=0.2) as call:
        with pytest.raises(TransientError, match=r"within 0\.2 s; safe to retry"):
            await call()


async def test_a_truncated_response_is_an_error() -> None:
    """Unreadable bodies are not successes."""

    async def garbled(_: web.Request) -> web.Response:
        return web.Response(text='{"items": [')

    async with asked(garbled) as call:
        with pytest.raises(TransientError, match="cannot be decoded"):
            await call()


async def test_connection_errors_are_transient() -> None:
    """An unreachable region is not a refusal."""
    calls = RestClient(_token, call_seconds_max=5.0)
    with pytest.raises(TransientError, match="safe to retry"):
        await calls.call("things.list", "GET", "http://127.0.0.1:1/", rate_limit=RateLimit(1.0, 1))
    await calls.close()
