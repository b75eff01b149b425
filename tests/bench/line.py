"""One line of the table."""

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, against what. `met` is None where nothing is promised."""

    case: str
    value: float
    unit: str
    against: str
    target: str | None = None
    met: bool | None = None
    # A time that is missed, but by less than five times: told, and no failure, as times move with the machine.
    is_tolerated: bool = False
