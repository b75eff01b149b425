"""The whole system under virtual time: promises kept in a swarm of runs, and runs that are what they say they are."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_autoscaler.sim.faults.injection import KINDS
from gpu_autoscaler.sim.simulation import Result, Setting
from gpu_autoscaler.sim.tick_skipping.differential import PROMISE, run_differential
from gpu_autoscaler_services.simulate import run_one, run_one_differential
from gpu_autoscaler_services.simulation import ROLES

REGRESSIONS = Path(__file__).parent / "regressions.txt"
SHORT_HOURS = 0.5


def found_seeds() -> list[Setting]:
    """The runs that once broke a promise."""
    lines = (line.split(maxsplit=3) for line in REGRESSIONS.read_text().splitlines() if not line.startswith("#"))
    return [
        Setting(seed=int(seed), hours=float(hours), jobs_per_hour=None if jobs == "-" else float(jobs))
        for seed, hours, jobs, _ in lines
    ]


@pytest.mark.parametrize("seed", range(1, 7))
def test_every_promise_is_kept(seed: int) -> None:
    """Each seed has its own mix of faults; when they stop, everything comes to rest."""
    result = run_one(Setting(seed=seed, hours=SHORT_HOURS))
    assert result.broken == ()
    assert result.plans_count > 0
    assert result.pods_count > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", found_seeds(), ids=lambda setting: f"seed-{setting.seed}")
def test_what_once_broke_holds(setting: Setting) -> None:
    """Seeds that were found stay found."""
    assert run_one(setting).broken == ()


def test_everything_at_once_is_survived() -> None:
    """Every kind of fault there is, in one run."""
    result = run_one(Setting(seed=77, hours=1.0, kinds=tuple(sorted(KINDS))))
    assert result.broken == ()
    assert len(result.faults) >= len(KINDS) / 3


def test_one_seed_is_one_run() -> None:
    """Another process, with other hashes of strings, says the same facts byte for byte."""
    setting = Setting(seed=5, hours=SHORT_HOURS, kinds=tuple(sorted(KINDS)))
    here = run_one(setting)
    program = (
        "from gpu_autoscaler.sim.simulation import Setting\n"
        "from gpu_autoscaler_services.simulate import run_one\n"
        f"print(run_one(Setting(seed={setting.seed}, hours={setting.hours}, kinds={setting.kinds})).digest)\n"
    )
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here.digest


@pytest.mark.parametrize("seed", [2, 3, 36])  # of 36 a move was looked at too late, as its pod had run for long enough
def test_a_tick_that_is_skipped_had_nothing_to_say(seed: int) -> None:
    """Runs with every tick and without those that see nothing new are one run."""
    assert run_one_differential(Setting(seed=seed, hours=SHORT_HOURS)).broken == ()


def test_a_tick_that_is_skipped_too_often_is_told_with_the_first_fact_that_differs() -> None:
    """A scaler that looks at nothing once it had nothing to say breaks the promise, at a fact that both runs show."""
    forgetful = {**ROLES, "scaler": dataclasses.replace(ROLES["scaler"], tick_inputs=lambda *_: "nothing new")}
    result = run_differential(Setting(seed=2, hours=SHORT_HOURS), forgetful)
    assert result.promise == PROMISE
    assert result.broken[0].startswith(f"{PROMISE}: fact ")


def test_the_codec_changes_nothing() -> None:
    """Facts that go through JSON on their way are the facts that went in."""
    setting = Setting(seed=4, hours=SHORT_HOURS)
    assert run_one(setting).digest == run_one(replace(setting, is_coded=True)).digest


def test_another_seed_is_another_run() -> None:
    """Else a swarm would be one run, many times."""
    results: list[Result] = [run_one(Setting(seed=seed, hours=0.2)) for seed in (1, 2)]
    assert results[0].digest != results[1].digest
