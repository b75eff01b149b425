"""Labels and taints in the text that a fake's nodes start with, in the form of the kubelet's flags."""

from gpu_autoscaler.model.scheduling import Taint

# What the nodes of the fakes start with; the drivers fill it in, as they fill in anybody's.
USER_DATA = "labels={labels}\ntaints={taints}\n"


def labels_in(text: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a filled USER_DATA."""
    return tuple((key, value) for key, _, value in (one.partition("=") for one in _listed(text, "labels")))


def taints_in(text: str) -> tuple[Taint, ...]:
    """Return the taints of a filled USER_DATA."""
    return tuple(_taint(one) for one in _listed(text, "taints"))


def _listed(text: str, name: str) -> list[str]:
    given = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return [one for one in given.get(name, "").split(",") if one]


def _taint(text: str) -> Taint:
    head, _, effect = text.rpartition(":")
    key, _, value = head.partition("=")
    return Taint(key, effect, value)  # type: ignore[arg-type]
