"""`policy check` validates a file before it is used."""

import asyncio
from pathlib import Path

import pytest
from tests.support.front import front
from tests.support.stories import offer, on_sale

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


def test_every_error_is_reported_with_its_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once on stderr, with the exit code of invalid input."""
    path = tmp_path / "policy.toml"
    path.write_text('nodes_count_min = 5\nnodes_count_max = 2\n[[pools]]\nname = "a"\n[[pools]]\nname = "a"\n')
    assert run(("policy", "check", str(path))) == Exit.USAGE
    errors = capsys.readouterr().err
    assert "2 error(s)" in errors
    assert "lower it or raise the other" in errors
    assert "use unique names" in errors


def test_a_valid_policy_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what was not checked."""
    path = tmp_path / "policy.toml"
    path.write_text("nodes_count_max = 5\n")
    assert run(("policy", "check", str(path))) == Exit.OK
    captured = capsys.readouterr()
    assert "valid (1 pools: default)" in captured.out
    assert "--check-offers" in captured.err


async def test_pools_are_checked_against_offers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway has the current offers."""
    path = tmp_path / "policy.toml"
    path.write_text('[[pools]]\nname = "a"\nzones = ["nowhere"]\n')
    async with front(tmp_path) as gate:
        command = ("policy", "check", str(path), "--check-offers", "--gateway", gate.url)
        assert await asyncio.to_thread(run, command) == Exit.FAILURE
        assert "no recent offers" in capsys.readouterr().err
        await gate.tell(on_sale(offer()))
        assert await asyncio.to_thread(run, command) == Exit.USAGE
        assert "pools[0].zones: 'nowhere' is not offered" in capsys.readouterr().err
