"""EC2 instance metadata: tokens, "none" is 404 alone, and anything else is no answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler.cloudmeta.aws import ANSWER_BYTES_MAX, AwsMetadata
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.model.errors import TransientError

ACTION = "/latest/meta-data/spot/instance-action"
MAINTENANCE = "/latest/meta-data/events/maintenance/scheduled"
LIFECYCLE = "/latest/meta-data/autoscaling/target-lifecycle-state"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Ec2:
    """A metadata address that says what the test put there, to whoever holds its current token."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.tokens_count = 0
        self.accepts: Callable[[str], bool] = lambda token: token == f"token-{self.tokens_count}"
        self.status: int | None = None  # what every answer's status is, if set
        self.seconds = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        """As EC2 does."""
        await asyncio.sleep(self.seconds)
        if self.status is not None:
            return web.Response(status=self.status)
        if request.path == "/latest/api/token":
            assert request.method == "PUT"
            assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            self.tokens_count += 1
            return web.Response(text=f"token-{self.tokens_count}")
        if not self.accepts(request.headers.get("X-aws-ec2-metadata-token", "")):
            return web.Response(status=401)
        if request.path not in self.texts:
            return web.Response(status=404)
        return web.Response(text=self.texts[request.path])


@pytest.fixture
async def ec2() -> Ec2:
    """A quiet instance."""
    return Ec2()


@pytest.fixture
async def metadata(ec2: Ec2) -> AsyncIterator[AwsMetadata]:
    """A client of it."""
    async with serving(ec2.answer) as url, aiohttp.ClientSession() as session:
        yield AwsMetadata(session, url, call_seconds_max=0.3)


async def test_404_is_none(metadata: AwsMetadata) -> None:
    """Neither notice nor hint."""
    assert await metadata.reclaim_notices() == ()
    assert await metadata.rebalance_recommended_at() is None


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
async def test_a_notice_is_read(ec2: Ec2, metadata: AwsMetadata, action: str) -> None:
    """Kind and deadline; read twice it is equal, so it is one notice."""
    ec2.texts[ACTION] = f'{{"action": "{action}", "time": "2026-09-18T08:22:00Z"}}'
    (notice,) = await metadata.reclaim_notices()
    assert [notice] == list(await metadata.reclaim_notices())
    assert isinstance(notice, ReclaimNotice)
    assert (notice.kind, notice.reclaim_at) == (action, datetime(2026, 9, 18, 8, 22, tzinfo=UTC))


async def test_maintenance_is_a_notice_with_its_event_and_start(ec2: Ec2, metadata: AwsMetadata) -> None:
    """Only while it is active; EC2 writes the date in words."""
    event = '{"NotBefore": "21 Jan 2026 09:00:43 GMT", "Code": "system-reboot", "EventId": "%s", "State": "%s"}'
    events = [event % ("instance-event-1", "active"), event % ("instance-event-2", "completed")]
    ec2.texts[MAINTENANCE] = f"[{', '.join(events)}]"
    started_at = datetime(2026, 1, 21, 9, 0, 43, tzinfo=UTC)
    assert list(await metadata.reclaim_notices()) == [ReclaimNotice("maintenance", "instance-event-1", started_at)]


async def test_a_maintenance_date_that_cannot_be_read_is_no_all_clear(ec2: Ec2, metadata: AwsMetadata) -> None:
    """It is an error that contains the text."""
    ec2.texts[MAINTENANCE] = '[{"NotBefore": "soon", "EventId": "e", "State": "active"}]'
    with pytest.raises(TransientError, match="'soon' is not an EC2 date"):
        await metadata.reclaim_notices()


async def test_a_group_that_ends_its_instance_gives_notice(ec2: Ec2, metadata: AwsMetadata) -> None:
    """`Terminated` as target; without a deadline, as metadata has none. Any other target is none."""
    ec2.texts[LIFECYCLE] = "InService"
    assert await metadata.reclaim_notices() == ()
    ec2.texts[LIFECYCLE] = "Terminated"
    metadata._slow_read_at_seconds = None
    assert list(await metadata.reclaim_notices()) == [ReclaimNotice("terminate", "autoscaling", None)]


async def test_a_hint_is_read(ec2: Ec2, metadata: AwsMetadata) -> None:
    """Its instant."""
    ec2.texts[REBALANCE] = '{"noticeTime": "2026-09-18T08:22:00Z"}'
    assert await metadata.rebalance_recommended_at() == datetime(2026, 9, 18, 8, 22, tzinfo=UTC)


async def test_the_instance_is_named_as_kubernetes_names_it(ec2: Ec2, metadata: AwsMetadata) -> None:
    """Zone and id make the provider id."""
    ec2.texts["/latest/meta-data/placement/availability-zone"] = "eu-west-1a"
    ec2.texts["/latest/meta-data/instance-id"] = "i-0abc"
    assert await metadata.provider_id() == "aws:///eu-west-1a/i-0abc"


async def test_one_token_serves_many_reads(ec2: Ec2, metadata: AwsMetadata) -> None:
    """It is fetched once; a refused one is dropped and fetched again."""
    await metadata.reclaim_notices()
    await metadata.reclaim_notices()
    fetched_count = ec2.tokens_count
    ec2.tokens_count += 1  # the one in use is no longer the current one
    assert await metadata.reclaim_notices() == ()
    assert (fetched_count, ec2.tokens_count) == (1, 3)


async def test_tokens_that_never_work_are_reported(ec2: Ec2, metadata: AwsMetadata) -> None:
    """It asks twice and then says so, instead of asking for ever."""
    ec2.accepts = lambda _token: False
    with pytest.raises(TransientError, match="fresh token is rejected"):
        await metadata.reclaim_notices()
    assert ec2.tokens_count == 2


@pytest.mark.parametrize("status", [403, 429, 500, 502, 503])
async def test_a_failed_read_is_not_no_notice(ec2: Ec2, metadata: AwsMetadata, status: int) -> None:
    """Whatever is no 404 raises."""
    ec2.status = status
    with pytest.raises(TransientError, match=str(status)):
        await metadata.reclaim_notices()


async def test_silence_is_not_no_notice(ec2: Ec2, metadata: AwsMetadata) -> None:
    """An address that hangs raises at its limit."""
    ec2.seconds = 5.0
    with pytest.raises(TransientError, match="notices are unknown"):
        await metadata.reclaim_notices()


@pytest.mark.parametrize("text", ["", "{}", '{"action": "dance", "time": "2026-09-18T08:22:00Z"}', "terminate"])
async def test_an_unreadable_notice_is_reported(ec2: Ec2, metadata: AwsMetadata, text: str) -> None:
    """Never taken for none."""
    ec2.texts[ACTION] = text
    with pytest.raises(TransientError, match="undecodable answer"):
        await metadata.reclaim_notices()


async def test_an_answer_that_comes_in_pieces_is_read_whole() -> None:
    """Half of an instance's id would name another instance."""

    async def answer(request: web.Request) -> web.StreamResponse:
        text = {"/latest/api/token": "token", "/latest/meta-data/instance-id": "i-0123456789"}
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in text.get(request.path, "eu-west-1a"):
            await response.write(piece.encode())
            await asyncio.sleep(0.005)
        return response

    async with serving(answer) as url, aiohttp.ClientSession() as session:
        assert await AwsMetadata(session, url).provider_id() == "aws:///eu-west-1a/i-0123456789"


async def test_an_answer_without_an_end_is_no_answer() -> None:
    """What is longer than any metadata is not kept, and not taken for a value."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text="token" if request.method == "PUT" else "x" * (ANSWER_BYTES_MAX + 1))

    async with serving(answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(TransientError, match="more than"):
            await AwsMetadata(session, url).provider_id()
