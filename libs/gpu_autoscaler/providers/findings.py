"""What an examination of a cloud's set-up says: each thing with its name and the next step."""

from typing import Literal

import msgspec

# fault: nothing can be bought, or removed, until it is changed · advice: it works, and something is lost
Level = Literal["fine", "advice", "fault"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    level: Level
    subject: str  # what was looked at: a setting, a call, a group
    said: str
    next_step: str = ""  # empty where nothing is to be done


def fine(subject: str, said: str) -> Finding:
    """It is as it should be."""
    return Finding(level="fine", subject=subject, said=said)


def advice(subject: str, said: str, next_step: str) -> Finding:
    """It works, and something is lost."""
    return Finding(level="advice", subject=subject, said=said, next_step=next_step)


def fault(subject: str, said: str, next_step: str) -> Finding:
    """It does not work."""
    return Finding(level="fault", subject=subject, said=said, next_step=next_step)
