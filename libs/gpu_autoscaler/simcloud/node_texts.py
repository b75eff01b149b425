"""Labels and taints in the user data of fake instances, in the syntax of kubelet flags."""

from gpu_autoscaler.model.scheduling import Taint

# User data of fake nodes; the drivers fill it in like any other.
USER_DATA = "labels={labels}\ntaints={taints}\n"


def labels_in(text: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a filled USER_DATA."""
    return tuple((key, value) for key, _, value in (entry.partition("=") for entry in _listed(text, "labels")))


def taints_in(text: str) -> tuple[Taint, ...]:
    """Return the taints of a filled USER_DATA."""
    return tuple(_taint(entry) for entry in _listed(text, "taints"))


def _listed(text: str, name: str) -> list[str]:
    given = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return [entry for entry in given.get(name, "").split(",") if entry]


def _taint(text: str) -> Taint:
    head, _, effect = text.rpartition(":")
    key, _, value = head.partition("=")
    return Taint(key, effect, value)  # type: ignore[arg-type]
