"""Texts in files that provider settings name. Shared by all drivers."""

from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.protocol import Order


def read_text(owner: str, path: str) -> str:
    """Return the file's content. Raises ConfigError in the name of `owner`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(owner, [f"{path}: cannot be read: {exc.strerror}"]) from exc


def fill_template(text: str, order: Order) -> str:
    """Return the text with the node's labels and taints in the syntax of kubelet flags."""
    labels = ",".join(f"{key}={value}" for key, value in order.labels)
    taints = ",".join(f"{taint.key}={taint.value or ''}:{taint.effect}" for taint in order.taints)
    return text.replace("{labels}", labels).replace("{taints}", taints)
