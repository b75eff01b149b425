"""Groups with a desired capacity: new instances are assigned to pending orders only."""

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.desired_capacity import Ledger, decode_ledger

A, B = ActionId("a"), ActionId("b")


def test_new_members_are_assigned_to_orders_in_sequence() -> None:
    """The oldest order gets the oldest new member; the next order waits for the next one."""
    ledger = Ledger().with_order(A).with_order(B).with_members(["7"])
    assert (ledger.member_of(A), ledger.member_of(B), ledger.is_pending(B)) == ("7", None, True)
    assert ledger.with_members(["7", "8"]).member_of(B) == "8"


def test_earlier_members_are_foreign() -> None:
    """Also while an order's member is late; any surplus members are foreign too."""
    ledger = Ledger().with_members(["1"]).with_order(A)
    assert ledger.with_members(["1"]).member_of(A) is None
    later = ledger.with_members(["1", "2", "3"])
    assert later.member_of(A) == "2"
    assert later.foreign_members == {"1", "3"}


def test_a_lost_member_keeps_its_order() -> None:
    """The order was fulfilled: it launches no second member."""
    ledger = Ledger().with_order(A).with_members(["7"]).with_members([])
    assert ledger.member_of(A) == "7"
    assert not ledger.is_pending(A)


def test_a_cancelled_order_gets_no_member() -> None:
    """A member that is launched nevertheless is foreign."""
    ledger = Ledger().with_order(A).without_order(A).with_members(["7"])
    assert ledger.member_of(A) is None
    assert ledger.foreign_members == {"7"}


def test_an_order_with_an_unseen_lost_member_launches_no_other() -> None:
    """It gets a placeholder member, and the next new member belongs to the next order."""
    ledger = Ledger().with_order(A).with_order(B).with_lost_member(A, "unseen-1").with_members(["7"])
    assert (ledger.member_of(A), ledger.member_of(B)) == ("unseen-1", "7")
    assert decode_ledger(ledger.encode(256, 1, ["7"]) or ()) == ledger


def test_ledgers_survive_encoding() -> None:
    """In short texts; other texts beside them do no harm."""
    ledger = Ledger().with_members(["1"]).with_order(A, "500").with_order(B).with_members(["1", "7"])
    texts = ledger.encode(12, 10, ["1", "7"])
    assert texts is not None
    assert all(len(text) <= 12 for text in texts)
    assert decode_ledger([*texts, "hello"]) == ledger


def test_lost_members_are_dropped_first() -> None:
    """First old ones, then newer ones, then present ones; if it still does not fit, the result is None."""
    ledger = Ledger(assigned={str(number): (A, "") for number in range(10)})
    assert decode_ledger(ledger.encode(8, 10, ["3"]) or ()) == ledger
    assert decode_ledger(ledger.encode(8, 3, ["3"]) or ()).assigned.keys() == {"3", "8", "9"}
    assert decode_ledger(ledger.encode(8, 1, ["3"]) or ()).assigned == {"3": (A, "")}
    assert ledger.encode(8, 1, ["3", "4", "5"]) is None


def test_action_ids_are_encoded_compactly() -> None:
    """350 members fit the 40 tags of a scale set; the previous version's encoding is readable."""
    assigned = {str(number): (ActionId(f"{number:032x}"), "526000") for number in range(1000, 1350)}
    pending = ((ActionId("f" * 32), "526000"),)
    ledger = Ledger(assigned=assigned | {"7": (A, "1")}, pending=pending, foreign_members=frozenset("1"))
    texts = ledger.encode(256, 40, assigned)
    assert texts is not None
    assert all(len(text) <= 256 for text in texts)
    assert decode_ledger(reversed(texts)) == ledger
    old = decode_ledger(["1000=000000000000000000000000000003e8/526000 hello"])
    assert old.assigned == {"1000": (ActionId(f"{1000:032x}"), "526000")}
