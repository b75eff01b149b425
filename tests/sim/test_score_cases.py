"""Kept scores: used again while scenario and code stay, and no longer."""

import sys
from pathlib import Path

import pytest

from gpu_autoscaler_services import score as command
from gpu_autoscaler_services import score_cases
from gpu_autoscaler_services.score_cases import Case, keep_score, kept_score, score, sources_of

CASE = Case("steady", "karpenter", seed=1, hours=0.5)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_kept_score_is_used_until_scenario_or_code_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, other hours, another system or other code: scored anew. A damaged file: scored anew."""
    assert kept_score(CASE) is None
    result = score(CASE)
    keep_score(CASE, result)
    assert kept_score(CASE) == result
    others = (Case("steady", "karpenter", 2, 0.5), Case("steady", "karpenter", 1, 1.0), Case("steady", "fixed", 1, 0.5))
    assert [kept_score(case) for case in others] == [None] * 3
    with monkeypatch.context() as patch:
        patch.setattr(score_cases, "code_digest", lambda _: "other code")
        assert kept_score(CASE) is None
    kept = next(Path("out/scores").iterdir())
    kept.write_bytes(kept.read_bytes()[:-1])
    assert kept_score(CASE) is None


def test_code_that_decides_is_part_of_the_digest() -> None:
    """The rules of removal decide our score and no baseline's; a baseline's rules decide its own."""
    ours = sources_of(score_cases.CODE_OF_OURS)
    baselines = sources_of(score_cases.CODE_OF_BASELINES)
    assert "gpu_autoscaler.core.plan" in ours
    assert "gpu_autoscaler_services.scaler.service" in ours
    assert "gpu_autoscaler.core.plan" not in baselines
    assert "gpu_autoscaler.sim.scoring.baselines.karpenter" in baselines
    assert {
        "gpu_autoscaler.sim.cluster.scheduler",
        "gpu_autoscaler.sim.scoring.metrics",
    } <= ours.keys() & baselines.keys()


def test_a_stopped_command_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time: no case begins, and the exit status says so. Then the cases are scored, and then none is left."""
    arguments = ["score", "--world", "steady", "--hours", "0.5", "--seeds", "2", "--system", "karpenter"]
    for more, status, count in ((["--minutes", "0"], 3, 0), ([], 0, 2), (["--minutes", "0"], 0, 2)):
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        assert command.main() == status
        assert len(list(Path("out").glob("scores/*"))) == count
