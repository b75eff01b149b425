"""Files named by provider settings: texts and prices. Shared by all drivers."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.providers.protocol import Order


def read_text(owner: str, path: str) -> str:
    """Return the file's content. Raises ConfigError in the name of `owner`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(owner, [f"{path}: cannot be read: {exc.strerror}"]) from exc


def read_prices(owner: str, path: str | None) -> dict[str, int]:
    """Return micro-dollars per hour by offer key, or by `type/*/capacity type`. Raises ConfigError."""
    if path is None:
        return {}
    try:
        prices = msgspec.json.decode(read_text(owner, path), type=dict[str, float])
    except msgspec.DecodeError as exc:
        raise ConfigError(owner, [f"{path}: is not a JSON object of prices in US dollars per hour: {exc}"]) from exc
    return {key: round(usd * MICRO_USD_PER_USD) for key, usd in prices.items()}


def modified_at(path: str | None) -> datetime | None:
    """Return when the file was last written; None without a file."""
    return None if path is None else datetime.fromtimestamp(int(Path(path).stat().st_mtime), UTC)


def fill_template(text: str, order: Order) -> str:
    """Return the text with the node's labels and taints in the syntax of kubelet flags."""
    labels = ",".join(f"{key}={value}" for key, value in order.labels)
    taints = ",".join(f"{taint.key}={taint.value or ''}:{taint.effect}" for taint in order.taints)
    return text.replace("{labels}", labels).replace("{taints}", taints)
