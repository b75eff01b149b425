"""Commands that read the streams: `recompute`, `replay` and `dead-letters`, against a real broker."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.replay.histories_data import history_of

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.envelope import encode
from gpu_autoscaler.replay.recording import load
from gpu_autoscaler.replay.retrace import retrace
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run

pytestmark = pytest.mark.integration


@pytest.fixture
async def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsBus]:
    """A broker for this test, configured through the environment."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    monkeypatch.setenv("GPU_AUTOSCALER_NATS_URL", server.url)
    opened = await NatsBus.connect(server.url, name="test", declared=BusDeclaration(streams=streams()))
    await opened.ensure()
    yield opened
    await opened.close()
    await server.stop()


async def _run(*tokens: str) -> int:
    return await asyncio.to_thread(run, tokens)


async def _add_dead_letter(bus: NatsBus) -> None:
    ack = await bus.publish("job.requested", b'{"job_name": "half', message_id="broken")
    message = await bus.message_at("JOB", ack.sequence)
    assert message is not None
    await DeadLetters(bus).set_aside(
        message,
        service="scheduler",
        reason="no JSON",
        error_kind="InvalidFact",
        delivered_count=1,
        at=datetime.now(UTC),
    )


async def test_dead_letters_are_listed_and_resubmitted(bus: NatsBus, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is shown, the message is published on its original subject, and the list shows it."""
    await _add_dead_letter(bus)
    assert await _run("dead-letters", "list", "-o", "json") == Exit.OK
    (letter,) = json.loads(capsys.readouterr().out)
    assert (letter["reason"], letter["payload"], letter["resubmitted_count"]) == ("no JSON", '{"job_name": "half', 0)

    assert await _run("dead-letters", "resubmit", str(letter["sequence"])) == Exit.OK

    assert "job.requested JOB:2" in capsys.readouterr().out
    await _run("dead-letters", "list", "-o", "json")
    assert json.loads(capsys.readouterr().out)[0]["resubmitted_count"] == 1
    assert await _run("dead-letters", "resubmit", "--all") == Exit.OK
    assert capsys.readouterr().out == ""


async def test_resubmitting_needs_a_choice(bus: NatsBus, capsys: pytest.CaptureFixture[str]) -> None:
    """One letter or --all is required; an unknown letter is an error."""
    assert await _run("dead-letters", "resubmit") == Exit.USAGE
    assert await _run("dead-letters", "resubmit", "1", "--all") == Exit.USAGE
    assert await _run("dead-letters", "resubmit", "99") == Exit.FAILURE
    assert "99" in capsys.readouterr().err


async def test_recomputing_an_unknown_plan_is_not_found(bus: NatsBus, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, with the command that lists plans."""
    assert await _run("recompute", "nobody") == Exit.NOT_FOUND
    assert "plans -o name" in capsys.readouterr().err


async def test_an_unreachable_broker_is_a_time_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 4, with the address."""
    assert await _run("dead-letters", "list", "--nats", "nats://127.0.0.1:1") == Exit.TIME_OUT
    assert "127.0.0.1:1" in capsys.readouterr().err


async def _publish_history(bus: NatsBus, name: str) -> None:
    """Publish a recorded day without telemetry; each fact gets its original sequence."""
    for stored in load(history_of(name)).facts:
        recorded = stored.recorded
        if recorded.stream != "GPU":
            ack = await bus.publish(recorded.fact.subject(), encode(recorded.envelope), message_id=recorded.envelope.id)
            assert ack.sequence == recorded.sequence


def _policy_file(path: Path, **changes: object) -> Path:
    """Write the policy of the recorded day with changes."""
    fields = {
        name: value
        for name, value in msgspec.to_builtins(load(history_of("quiet")).head.policy).items()
        if isinstance(value, str | int | float)  # tables keep their defaults
    }
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in {**fields, **changes}.items()))
    return path


async def test_the_running_systems_history_is_replayed(
    bus: NatsBus, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the streams, then from the saved file; exit code 0 without differences, else 1."""
    await _publish_history(bus, "quiet")
    monkeypatch.setenv("GPU_AUTOSCALER_POLICY_PATH", str(_policy_file(tmp_path / "same.toml")))
    saved = tmp_path / "kept.jsonl.xz"
    expected = retrace(load(history_of("quiet")))
    code = Exit.FAILURE if expected.deviations else Exit.OK

    assert await _run("replay", "--from", "2026-01-01", "--save", str(saved)) == code, capsys.readouterr()
    summary = capsys.readouterr().out.splitlines()[0]
    assert f"{expected.plans_count} recorded plans" in summary
    assert await _run("replay", str(saved)) == code
    assert capsys.readouterr().out.splitlines()[0] == summary

    other = _policy_file(tmp_path / "other.toml", idle_seconds_max=86_400)
    monkeypatch.setenv("GPU_AUTOSCALER_POLICY_PATH", str(other))
    assert await _run("replay", "--from", "2026-01-01") == Exit.FAILURE
    captured = capsys.readouterr()
    assert "drain_node (node_idle) -> deferred (not_yet_idle)" in captured.out
    assert "another policy" in captured.err


async def test_an_interval_without_a_plan_is_not_found(bus: NatsBus, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3; invalid arguments are refused with 2."""
    assert await _run("replay", "--from", "2026-01-01", "--to", "2026-01-02") == Exit.NOT_FOUND
    assert "no plan between" in capsys.readouterr().err
    assert await _run("replay") == Exit.USAGE
    assert await _run("replay", "--from", "yesterday") == Exit.USAGE
    assert await _run("replay", "no-such-file.jsonl") == Exit.USAGE
