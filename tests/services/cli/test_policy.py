"""`policy check`: a file is judged before anything runs with it."""

import asyncio
from pathlib import Path

import pytest
from tests.support.front import front
from tests.support.stories import offer, on_sale

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


def test_every_mistake_is_told_with_its_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once on stderr, and the exit code of bad input."""
    path = tmp_path / "policy.toml"
    path.write_text('nodes_count_min = 5\nnodes_count_max = 2\n[[pools]]\nname = "a"\n[[pools]]\nname = "a"\n')
    assert run(("policy", "check", str(path))) == Exit.USAGE
    told = capsys.readouterr().err
    assert "2 mistake(s)" in told
    assert "lower the one or raise the other" in told
    assert "give each its own" in told


def test_a_policy_that_can_be_followed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was not looked at is named."""
    path = tmp_path / "policy.toml"
    path.write_text("nodes_count_max = 5\n")
    assert run(("policy", "check", str(path))) == Exit.OK
    said = capsys.readouterr()
    assert "can be followed (1 pools: default)" in said.out
    assert "--on-sale" in said.err


async def test_a_pool_is_held_against_what_is_for_sale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway knows the newest offers."""
    path = tmp_path / "policy.toml"
    path.write_text('[[pools]]\nname = "a"\nzones = ["nowhere"]\n')
    async with front(tmp_path) as gate:
        command = ("policy", "check", str(path), "--on-sale", "--gateway", gate.url)
        assert await asyncio.to_thread(run, command) == Exit.FAILURE
        assert "heard of no offers" in capsys.readouterr().err
        await gate.tell(on_sale(offer()))
        assert await asyncio.to_thread(run, command) == Exit.USAGE
        assert "pools[0].zones: 'nowhere' is not for sale" in capsys.readouterr().err
