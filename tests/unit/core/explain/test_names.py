"""Object names in place of uids and action ids, from the state or from recorded facts."""

from tests.support.stories import T0, bought, given, node, pod, purchase, record

from gpu_autoscaler.core.explain.names import deferred_sentence, names_in_history, names_in_state, reason_sentence
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected

NAMES = {"pod/uid-a": "pod/default/a", "node/uid-n1": "node/n1", "pod/unknown": "pod/unknown", "job/train": "job/train"}


def test_the_state_names_pods_nodes_and_orders() -> None:
    """An order is named by its instance once that exists; unknown keys stay as they are."""
    name_of = names_in_state(given(pod("a"), node("n1"), bought(purchase("buy-n2"))))

    assert {key: name_of(key) for key in NAMES} == NAMES
    assert name_of("order/buy-n2").startswith("instance/")
    assert name_of("action/buy-n2") == "action/p4d.24xlarge in zone-a (ordered)"


def test_recorded_facts_name_objects_that_no_longer_exist() -> None:
    """Each pod and node has been observed before it was deleted."""
    name_of = names_in_history(record([*pod("a"), *node("n1")]))

    assert {key: name_of(key) for key in NAMES} == NAMES


def test_sentences_use_names() -> None:
    """In the reason and in the subject of a deferral."""
    name_of = names_in_state(given(pod("a"), bought(purchase("buy-n2"))))
    demand = UnmetDemand(demand=("pod/uid-a",), offers_considered=1, price_micro_usd_per_hour=1)
    expected = CapacityExpected(node="buy-n2", expected_at=T0)

    assert "capacity for pod default/a;" in reason_sentence(demand, name_of)
    assert deferred_sentence(Deferred(step="cover_demand", subject="pod/uid-a", reason=expected), name_of) == (
        "Deferred for pod default/a (step cover_demand): Capacity on node p4d.24xlarge in zone-a (ordered) is expected "
        "about 2026-11-21 12:00:00 UTC."
    )
