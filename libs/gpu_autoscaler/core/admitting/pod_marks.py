"""Whether the labels and annotations that a request wants on its pods may stand there. Called by admission.

What says who the pod is, and what others than its user say of it, is not the user's to write.
"""

import re
from collections.abc import Iterator, Mapping

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.jobs import PRIORITY_NAMES, Mistake

# Keys and values of labels; annotations have the same keys (Kubernetes documentation, "Labels and Selectors",
# "Annotations", syntax; read 2026-11-21).
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# Kubernetes takes 256 KiB of annotations; these go into every fact that carries the job as well. Our own.
MARKS_BYTES_MAX = 16 * 1024
# Of our own keys those by which a pod speaks for itself; for the others there are fields, or they are ours to write.
OURS_ALLOWED = (
    labels.CHECKPOINTED_AT,
    labels.CHECKPOINT_HOOK,
    labels.DO_NOT_DISRUPT,
    labels.EVICTION_PRIORITY,
    labels.EXPECTED_END,
)
# Controllers of Kubernetes find their pods by these, and take others' for their own.
_OF_CONTROLLERS = frozenset({"job-name", "controller-uid", "pod-template-hash", "statefulset.kubernetes.io/pod-name"})
_RESERVED = ("kubernetes.io", "k8s.io", "x-k8s.io")  # for Kubernetes itself (the same document)
_GROUPS = frozenset({*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION, labels.POD_GROUP_TOTAL_COUNT})


def mark_mistakes(request: JobRequested) -> Iterator[Mistake]:
    """Yield what is wrong with the labels and annotations of the pods."""
    for key, value in sorted(request.pod_labels.items()):
        if why := _label_mistake(key, value):
            yield Mistake("pod_labels", f"{_shown(key)} {why}")
    for key, value in sorted(request.pod_annotations.items()):
        if why := _annotation_mistake(key, value):
            yield Mistake("pod_annotations", f"{_shown(key)} {why}")
    size_bytes = _size_bytes(request.pod_labels) + _size_bytes(request.pod_annotations)
    if size_bytes > MARKS_BYTES_MAX:
        most = f"{size_bytes / 1024:.0f} KiB with the labels; at most {MARKS_BYTES_MAX // 1024} can be"
        yield Mistake("pod_annotations", f"have {most}: put what is large into the image or a volume")


def _label_mistake(key: str, value: str) -> str:
    if why := _key_mistake(key):
        return why
    if _domain(key).endswith(_RESERVED) or key in _OF_CONTROLLERS:
        return "is a label that Kubernetes and its controllers write; choose a key of your own"
    if _is_ours(key):
        return "is written by gpu-autoscaler; choose a key of your own"
    if value and not LABEL_VALUE.fullmatch(value):
        return f"is {_shown(value)}, which cannot be a label: at most 63 letters, digits, `-`, `_` and `.`"
    return ""


def _annotation_mistake(key: str, value: str) -> str:
    if why := _key_mistake(key):
        return why
    if key in _GROUPS:
        return "would make the pod part of another group; members of a job are one already"
    if key == "kubernetes.io/config.mirror":
        return "says that a kubelet made the pod itself; leave it out"
    if _is_ours(key) and key not in OURS_ALLOWED:
        return f"is written by gpu-autoscaler, or has a field of its own; allowed are {', '.join(OURS_ALLOWED)}"
    if key == labels.CHECKPOINT_HOOK and not labels.CHECKPOINT_HOOK_FORM.fullmatch(value):
        return f"is {_shown(value)}; it is a port and a path of the pod itself, as :8080/checkpoint"
    if key == labels.EVICTION_PRIORITY and value not in PRIORITY_NAMES:
        return f"is {_shown(value)}; use {', '.join(PRIORITY_NAMES)}"
    return ""


def _key_mistake(key: str) -> str:
    return "" if LABEL_KEY.fullmatch(key) else "is no key: letters, digits, `-`, `_` and `.`, after a DNS name and `/`"


def _is_ours(key: str) -> bool:
    domain = _domain(key)
    return domain == labels.PREFIX or domain.endswith(f".{labels.PREFIX}")


def _domain(key: str) -> str:
    return key.rpartition("/")[0]


def _size_bytes(marks: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in marks.items())


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
