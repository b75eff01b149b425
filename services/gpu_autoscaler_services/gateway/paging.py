"""Pages of lists: `limit` and `cursor` of every list operation, and `next_cursor` of its answer."""

import base64
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeVar

import msgspec

from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler_services.gateway.problems import Problem, rule_violated

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
_DIGITS = 20  # of microseconds since 1970
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)

T = TypeVar("T")


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which page of a list. Its filters stay the same from page to page."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="Maximum page size; a page may hold fewer.")] = (
        LIMIT_DEFAULT
    )
    cursor: Annotated[str | None, msgspec.Meta(description="`next_cursor` of the previous page.")] = None


def page(
    items: Iterable[T], key: Callable[[T], str], query: PageQuery, *, is_descending: bool = False
) -> tuple[tuple[T, ...], str | None]:
    """Return the items after the cursor, in the order of their keys, and the cursor of the next page.

    A cursor names the last item: items that come and go meanwhile neither repeat nor hide others.
    """
    ordered = sorted(items, key=key, reverse=is_descending)
    if query.cursor is not None:
        after = read_cursor(query.cursor)
        ordered = [item for item in ordered if (key(item) < after if is_descending else key(item) > after)]
    shown = tuple(ordered[: query.limit])
    return shown, cursor_of(key(shown[-1])) if len(ordered) > len(shown) else None


def instant_key(at: datetime, name: str) -> str:
    """Return a key that sorts by the instant, then by name."""
    return f"{(at - _EPOCH) // _MICROSECOND:0{_DIGITS}d}/{name}"


def instant_of(key: str) -> datetime:
    """Return the instant of a key. Raises a 422 for the key of another list."""
    number = key.partition("/")[0]
    if not number.isdecimal() or not number.isascii() or len(number) != _DIGITS:
        raise bad_cursor()
    try:
        return _EPOCH + int(number) * _MICROSECOND
    except OverflowError as error:
        raise bad_cursor() from error


def cursor_of(key: str) -> str:
    """Return the cursor after the item with this key."""
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> str:
    """Return the key. Raises a 422 for what is no cursor."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise bad_cursor() from error


def bad_cursor() -> Problem:
    """Return the problem of a cursor that no page of this list has named."""
    reason = "is not a cursor of this list; start again without one"
    return rule_violated("invalid cursor", Violation("cursor", reason))
