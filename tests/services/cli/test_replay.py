"""`replay` on files: no broker, no gateway, nothing but a history and today's code."""

import json
from pathlib import Path

import pytest
from tests.replay.histories_data import history_of

from gpu_autoscaler_services.cli.exits import Exit
from gpu_autoscaler_services.cli.main import run


def test_what_would_have_been_is_told_in_figures_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record, the model under the policy of the time, and the model under the other; a picture of the three."""
    policy, picture = tmp_path / "other.toml", tmp_path / "then.svg"
    policy.write_text("nodes_count_max = 3\n")
    command = ("replay", str(history_of("quiet")), "--policy", str(policy), "--picture", str(picture))

    assert run((*command, "-o", "json")) == Exit.OK

    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["other"]["nodes_count_max"] == 3 < document["recorded"]["nodes_count_max"]
    assert document["other"]["waiting"]["all"]["mean_seconds"] > document["modeled"]["waiting"]["all"]["mean_seconds"]
    cost = document["recorded"]["cost_micro_usd"]
    assert abs(document["modeled"]["cost_micro_usd"] - cost) < 0.1 * cost
    assert "the worlds part at" in said.err
    assert picture.read_text().startswith("<svg ")


def test_a_file_that_is_no_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is read from elsewhere; so is a policy that cannot be meant."""
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert run(("replay", str(path))) == Exit.USAGE
    assert "no head of a history" in capsys.readouterr().err

    policy = tmp_path / "other.toml"
    policy.write_text("idle_seconds = 5\n")
    assert run(("replay", str(history_of("quiet")), "--policy", str(policy))) == Exit.USAGE
    assert "idle_seconds_max" in capsys.readouterr().err
