"""The audit commands: list, verify, export; each way to change the trail in its database is found."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.store.audit_contract import TAMPERED
from tests.support.front import Front, front

from gpu_autoscaler.model.audit import Link, canonical, chained
from gpu_autoscaler_services.cli import audit as audit_commands
from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run

FREEZE = ("freeze", "--for", "1h", "--reason")


@pytest.fixture
async def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """A gateway whose trail has eight entries, configured through the environment."""
    async with front(tmp_path) as opened:
        monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", opened.url)
        monkeypatch.setattr(audit_commands, "PAGE_COUNT", 3)
        for number in range(8):
            assert await _run(*FREEZE, f"upkeep {number}") == Exit.OK
        yield opened


async def _run(*tokens: str) -> int:
    """Run a command line in a thread, because commands block without an event loop."""
    return await asyncio.to_thread(run, tokens)


async def test_acts_of_commands_are_listed(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """The last first; a page names the next one."""
    capsys.readouterr()
    assert await _run("audit", "list", "--verb", "freeze", "--limit", "5", "-o", "name") == Exit.OK
    assert capsys.readouterr().out.split() == ["8", "7", "6", "5", "4"]
    assert await _run("audit", "list", "--limit", "5", "-o", "wide") == Exit.OK
    told = capsys.readouterr()
    assert "upkeep 7" in told.out
    assert "cli" in told.out
    assert "more: --cursor 4" in told.err
    assert await _run("audit", "list", "--cursor", "4", "-o", "json") == Exit.OK
    assert [item["number"] for item in json.loads(capsys.readouterr().out)["items"]] == [3, 2, 1]


async def test_a_trail_is_whole_and_its_head_is_expected_later(gate: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed head is one of the chain after further acts; another one is not."""
    capsys.readouterr()
    assert await _run("audit", "verify") == Exit.OK
    told = capsys.readouterr()
    head = told.out.strip()
    assert head.startswith("8:")
    assert "8 entries" in told.err
    assert await _run(*FREEZE, "more") == Exit.OK
    assert await _run("audit", "verify", "--expect-head", head) == Exit.OK
    capsys.readouterr()
    other = f"8:{'a' * 64}"
    assert await _run("audit", "verify", "--expect-head", other) == Exit.FAILURE
    assert "entry 8 has another hash than expected" in capsys.readouterr().err
    assert await _run("audit", "verify", "--expect-head", "8:short") == Exit.USAGE


_CUT = """
UPDATE audit_chain SET (anchor_number, anchor_hash) = (SELECT number, hash FROM audit WHERE number = 9);
DELETE FROM audit WHERE number = 9;
"""


@pytest.mark.parametrize(("script", "broken"), TAMPERED.items())
async def test_what_was_done_to_the_database_is_found(
    gate: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, broken: str
) -> None:
    """The first broken entry is named, and the command fails."""
    _tamper(tmp_path, script)
    assert await _run("audit", "verify") == Exit.FAILURE
    assert f"audit trail is broken: {broken}" in capsys.readouterr().err
    assert await _run("audit", "list") == Exit.OK, "what is there can be read"


def _tamper(folder: Path, script: str) -> None:
    with sqlite3.connect(folder / "store.db") as file:
        file.executescript(script)
    file.close()


async def test_a_trail_written_anew_is_found_by_a_kept_head_alone(
    gate: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever computes all hashes has a whole chain, but not the one of before."""
    capsys.readouterr()
    assert await _run("audit", "verify") == Exit.OK
    head = capsys.readouterr().out.strip()
    with sqlite3.connect(tmp_path / "store.db") as file:
        last = Link()
        for number, entry in file.execute("SELECT number, entry FROM audit ORDER BY number").fetchall():
            text = canonical(json.loads(entry) | {"who": "somebody else"})
            last = Link(number=number, hash=chained(last.hash, text))
            file.execute("UPDATE audit SET entry = ?, hash = ? WHERE number = ?", (text, last.hash, number))
        file.execute("UPDATE audit_chain SET head_hash = ?", (last.hash,))
    file.close()
    assert await _run("audit", "verify") == Exit.OK
    assert await _run("audit", "verify", "--expect-head", head) == Exit.FAILURE


async def test_exports_are_checked_without_a_gateway(
    gate: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON lines; a later export continues where an earlier one ended. A changed line is found."""
    whole, rest = tmp_path / "whole.jsonl", tmp_path / "rest.jsonl"
    for path, options in ((whole, ()), (rest, ("--after", "6"))):
        capsys.readouterr()
        assert await _run("audit", "export", *options) == Exit.OK
        path.write_text(capsys.readouterr().out, encoding="utf-8")
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line.get("number") for line in lines] == [None, *range(1, 9)]
    assert json.loads(rest.read_text().splitlines()[0])["after"] == {"hash": lines[6]["hash"], "number": 6}
    assert await _run("audit", "export", "--after", "99") == Exit.NOT_FOUND
    monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", "http://127.0.0.1:1")
    for path in (whole, rest):
        assert await _run("audit", "verify", "--file", str(path)) == Exit.OK
    assert await _run("audit", "verify", "--file", str(rest), "--expect-head", f"6:{lines[6]['hash']}") == Exit.OK
    changed = tmp_path / "changed.jsonl"
    changed.write_text(whole.read_text().replace("upkeep 3", "upkeep 9"), encoding="utf-8")
    capsys.readouterr()
    assert await _run("audit", "verify", "--file", str(changed)) == Exit.FAILURE
    assert "entry 4 does not have its hash" in capsys.readouterr().err
    for text in ("", "{}", "no json", f"{whole.read_text()}[]\n"):
        changed.write_text(text, encoding="utf-8")
        assert await _run("audit", "verify", "--file", str(changed)) == Exit.USAGE
    assert await _run("audit", "verify", "--file", str(tmp_path / "absent")) == Exit.USAGE


async def test_a_trail_is_whole_after_retention(
    gate: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked and exported from the first entry that is left; after a cut while it is read, reading starts over."""
    store, now = gate.model.store, gate.model.clock.now()
    pages = audit_commands._pages
    cuts: list[int] = []

    def cut_between(gateway: Gateway) -> Iterator[dict[str, Any]]:
        for page in pages(gateway):
            yield page
            if not cuts:
                cuts.append(asyncio.run_coroutine_threadsafe(store.cut_audit(before=_later, at=now), loop).result())

    loop, _later = asyncio.get_running_loop(), now.replace(year=now.year + 1)
    monkeypatch.setattr(audit_commands, "_pages", cut_between)
    capsys.readouterr()
    assert await _run("audit", "verify") == Exit.OK
    assert cuts == [8]
    assert capsys.readouterr().out.startswith("9:")
    await _run(*FREEZE, "more")
    capsys.readouterr()
    assert await _run("audit", "export") == Exit.OK
    path = tmp_path / "export.jsonl"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert await _run("audit", "verify", "--file", str(path)) == Exit.OK
    _tamper(tmp_path, _CUT)
    capsys.readouterr()
    assert await _run("audit", "verify") == Exit.FAILURE
    assert "entries up to 9 are missing, and no entry records their removal" in capsys.readouterr().err
