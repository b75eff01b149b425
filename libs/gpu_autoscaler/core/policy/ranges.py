"""Ranges and descriptions of policy fields."""

from typing import Annotated, Any

from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
MicroUsdPerHour = Annotated[int, Meta(ge=0)]
MicroUsd = Annotated[int, Meta(ge=0)]


def about(text: str, source: str, **bounds: Any) -> Meta:  # noqa: ANN401 - keywords of Meta
    """Describe a field with the source of its default; a source that starts with # is in docs/decisions.md."""
    document = f"docs/decisions.md{source}" if source.startswith("#") else source
    meta: Meta = Meta(description=f"{text} Source: {document}.", **bounds)
    return meta
