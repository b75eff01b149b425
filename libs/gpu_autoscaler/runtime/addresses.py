"""The address of something on a node, from a template in the settings and what is known of the node."""

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
            raise ConfigError("address template", [f"{template!r}: {exc}"]) from exc
        if unknown := [name for name in names if name not in PLACEHOLDERS]:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ConfigError("address template", [f"{template!r}: {unknown[0]!r} is none of {known}"])
        self._needed = frozenset(names)

    @property
    def is_shared(self) -> bool:
        """True when all nodes would get the same address."""
        return not self._needed

    def of(self, node: NodeObserved) -> str | None:
        """Return the node's address, None while something that the template needs is not known of it."""
        known = {
            "node_name": node.name,
            "node_uid": node.node_uid,
            "internal_ip": node.internal_ip,
            "provider_id": node.provider_id,
        }
        if any(known[name] is None for name in self._needed):
            return None
        return self._template.format(**known)
