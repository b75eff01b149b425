"""Policy objects in the simulator: disabled, enabled and edited; every plan is checked against its own cut."""

import msgspec
import pytest

from gpu_autoscaler.core.policy import documents
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.sim.actors.policies import EDITS_POLICY_OBJECTS, documents_of
from gpu_autoscaler.sim.simulation import Setting, run
from gpu_autoscaler_services.simulation import ROLES

SETTING = Setting(seed=26, hours=0.5, kinds=(EDITS_POLICY_OBJECTS,), faults_times=8.0)


def test_some_runs_have_policy_objects() -> None:
    """Decided by the seed only."""
    kept_count = sum(bool(documents_of(seed)) for seed in range(1000))
    assert 60 < kept_count < 180


def test_a_disabled_pool_is_deferred_with_its_reason() -> None:
    """Deferred with its reason while disabled, bought afterwards; the run becomes quiescent."""
    result = run(SETTING, ROLES)
    assert documents_of(SETTING.seed)
    assert result.violations == ()
    assert result.faults[EDITS_POLICY_OBJECTS] > 0
    assert result.reasons["pool_paused"] > 0


def test_a_purchase_for_a_disabled_pool_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a merge that ignores `is_enabled` the monitor reports it in the same run."""
    true = documents._pool

    def forgetful(pool: DocumentPool, document: PolicyDocument, most: int) -> NodePool:
        return msgspec.structs.replace(true(pool, document, most), is_paused=False)

    monkeypatch.setattr(documents, "_pool", forgetful)
    result = run(SETTING, ROLES)
    assert result.invariant == "directives are obeyed"
