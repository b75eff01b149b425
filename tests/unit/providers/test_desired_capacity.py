"""Groups that are told a number: a newcomer is the order's that stands, and nobody else's."""

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.desired_capacity import Ledger, decode_ledger

A, B = ActionId("a"), ActionId("b")


def test_newcomers_are_given_to_orders_in_their_order() -> None:
    """The oldest order gets the oldest newcomer; the next one waits for the next."""
    ledger = Ledger().with_order(A).with_order(B).with_members(["7"])
    assert (ledger.member_of(A), ledger.member_of(B), ledger.is_pending(B)) == ("7", None, True)
    assert ledger.with_members(["7", "8"]).member_of(B) == "8"


def test_who_was_there_before_is_nobody_s() -> None:
    """Also when the member of an order is long in coming; and when it has come, more are strangers too."""
    ledger = Ledger().with_members(["1"]).with_order(A)
    assert ledger.with_members(["1"]).member_of(A) is None
    later = ledger.with_members(["1", "2", "3"])
    assert later.member_of(A) == "2"
    assert later.foreign_members == {"1", "3"}


def test_a_member_that_is_gone_keeps_its_order() -> None:
    """The order has had its machine: it buys no second one."""
    ledger = Ledger().with_order(A).with_members(["7"]).with_members([])
    assert ledger.member_of(A) == "7"
    assert not ledger.is_pending(A)


def test_an_order_that_is_taken_back_gets_nobody() -> None:
    """A machine that comes after all is a stranger."""
    ledger = Ledger().with_order(A).without_order(A).with_members(["7"])
    assert ledger.member_of(A) is None
    assert ledger.foreign_members == {"7"}


def test_an_order_whose_member_came_and_went_unseen_buys_no_other() -> None:
    """It has a member that never is, and the next newcomer is the next order's."""
    ledger = Ledger().with_order(A).with_order(B).with_lost_member(A, "unseen-1").with_members(["7"])
    assert (ledger.member_of(A), ledger.member_of(B)) == ("unseen-1", "7")
    assert decode_ledger(ledger.encode(256, 1, ["7"]) or ()) == ledger


def test_what_is_written_is_read_back() -> None:
    """In short texts; what people have written beside it does no harm."""
    ledger = Ledger().with_members(["1"]).with_order(A, "500").with_order(B).with_members(["1", "7"])
    texts = ledger.encode(12, 10, ["1", "7"])
    assert texts is not None
    assert all(len(text) <= 12 for text in texts)
    assert decode_ledger([*texts, "hello"]) == ledger


def test_members_that_are_gone_make_room() -> None:
    """First all that was, then the newest, then what is there; and where even that is too much, it says so."""
    ledger = Ledger(assigned={str(number): (A, "") for number in range(10)})
    assert decode_ledger(ledger.encode(8, 10, ["3"]) or ()) == ledger
    assert decode_ledger(ledger.encode(8, 3, ["3"]) or ()).assigned.keys() == {"3", "8", "9"}
    assert decode_ledger(ledger.encode(8, 1, ["3"]) or ()).assigned == {"3": (A, "")}
    assert ledger.encode(8, 1, ["3", "4", "5"]) is None


def test_actions_of_ours_take_little_room_and_share_a_note() -> None:
    """Three hundred and fifty members in the forty tags of a scale set; what an earlier version wrote is read."""
    assigned = {str(number): (ActionId(f"{number:032x}"), "526000") for number in range(1000, 1350)}
    ledger = Ledger(assigned=assigned | {"7": (A, "1")}, pending=((ActionId("f" * 32), "526000"),), foreign_members=frozenset("1"))
    texts = ledger.encode(256, 40, assigned)
    assert texts is not None
    assert all(len(text) <= 256 for text in texts)
    assert decode_ledger(reversed(texts)) == ledger
    old = decode_ledger(["1000=000000000000000000000000000003e8/526000 hello"])
    assert old.assigned == {"1000": (ActionId(f"{1000:032x}"), "526000")}
