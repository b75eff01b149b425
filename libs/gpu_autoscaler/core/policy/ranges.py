"""Ranges of numbers in the policy."""

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
MicroUsdPerHour = Annotated[int, Meta(ge=0)]
MicroUsd = Annotated[int, Meta(ge=0)]
