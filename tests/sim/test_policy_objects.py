"""Policies kept as objects in the simulator: switched off and on and edited, and every plan held to what it knew."""

import msgspec
import pytest

from gpu_autoscaler.core.policy import documents
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.sim.actors.policy_objects import EDITS_POLICY_OBJECTS, documents_of
from gpu_autoscaler.sim.simulation import Setting, run
from gpu_autoscaler_services.simulation import ROLES

SETTING = Setting(seed=26, hours=1.0, kinds=(EDITS_POLICY_OBJECTS,), faults_times=8.0)


def test_some_runs_keep_documents_and_most_do_not() -> None:
    """The seed decides, and nothing else."""
    kept_count = sum(bool(documents_of(seed)) for seed in range(1000))
    assert 60 < kept_count < 180


def test_what_is_switched_off_is_left_alone_and_said() -> None:
    """Held back with its reason while it is off, bought for afterwards; the run ends settled."""
    result = run(SETTING, ROLES)
    assert documents_of(SETTING.seed)
    assert result.broken == ()
    assert result.faults[EDITS_POLICY_OBJECTS] > 0
    assert result.reasons["pool_paused"] > 0


def test_a_pool_that_is_bought_for_though_it_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a merge that forgets the switch the witness sees it in the same run."""
    true = documents._pool

    def forgetful(pool: DocumentPool, document: PolicyDocument, most: int) -> NodePool:
        return msgspec.structs.replace(true(pool, document, most), is_paused=False)

    monkeypatch.setattr(documents, "_pool", forgetful)
    result = run(SETTING, ROLES)
    assert result.promise == "people are obeyed"
