"""URLs on a node, from a template in the settings."""

from string import Formatter

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.errors import ConfigError

PLACEHOLDERS = ("node_name", "node_uid", "internal_ip", "provider_id")


class NodeUrl:
    """A URL template such as `http://{internal_ip}:9400/metrics`. Raises ConfigError for an unknown placeholder."""

    def __init__(self, template: str) -> None:
        self._template = template
        try:
            names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        except ValueError as exc:
            raise ConfigError("URL template", [f"{template!r}: {exc}; correct the braces"]) from exc
        if unknown := [name for name in names if name not in PLACEHOLDERS]:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ConfigError("URL template", [f"{template!r}: unknown placeholder {unknown[0]!r}; use one of {known}"])
        self._names = frozenset(names)

    @property
    def is_shared(self) -> bool:
        """True when all nodes have the same URL."""
        return not self._names

    def of(self, node: NodeObserved) -> str | None:
        """Return the node's URL, None while a value that the template needs is unknown."""
        values = {
            "node_name": node.name,
            "node_uid": node.node_uid,
            "internal_ip": node.internal_ip,
            "provider_id": node.provider_id,
        }
        if any(values[name] is None for name in self._names):
            return None
        return self._template.format(**values)
