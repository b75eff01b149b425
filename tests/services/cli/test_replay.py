"""`replay` of files, without broker and gateway."""

import json
from pathlib import Path

import pytest
from tests.replay.histories_data import history_of

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


def test_another_policy_is_compared_in_figures_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recording, and the simulation under the recorded and the other policy."""
    policy, chart = tmp_path / "other.toml", tmp_path / "then.svg"
    policy.write_text("nodes_count_max = 3\n")
    command = ("replay", str(history_of("quiet")), "--policy", str(policy), "--chart", str(chart))

    assert run((*command, "-o", "json")) == Exit.OK

    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["other"]["nodes_count_max"] == 3 < document["recorded"]["nodes_count_max"]
    assert document["other"]["waiting"]["all"]["mean_seconds"] > document["modeled"]["waiting"]["all"]["mean_seconds"]
    cost = document["recorded"]["cost_micro_usd"]
    assert abs(document["modeled"]["cost_micro_usd"] - cost) < 0.1 * cost
    assert "the policies diverge at" in captured.err
    assert chart.read_text().startswith("<svg ")


def test_an_invalid_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So is an invalid policy."""
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert run(("replay", str(path))) == Exit.USAGE
    assert "not the head of a history" in capsys.readouterr().err

    policy = tmp_path / "other.toml"
    policy.write_text("idle_seconds_maximum = 5\n")
    assert run(("replay", str(history_of("quiet")), "--policy", str(policy))) == Exit.USAGE
    assert "idle_seconds_max" in capsys.readouterr().err
