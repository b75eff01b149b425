"""The Job controller's arithmetic: what a failed pod counts for, which indexes are done, what a new pod looks like.

Source: `pkg/controller/job` of Kubernetes 1.36 and the documentation, "Jobs: Pod failure policy" (read 2026-11-21).
Left out: success policies and back-off limits per index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from gpu_autoscaler.simcluster.kinds import JOBS
from gpu_autoscaler.simcluster.objects import Json, clone, controller_uid, is_finished, is_terminating

INDEX_KEY = "batch.kubernetes.io/job-completion-index"
BACKOFF_SECONDS = 10.0  # DefaultJobPodFailureBackOff, doubled with every failure in a row
BACKOFF_SECONDS_MAX = 600.0  # MaxJobPodFailureBackOff

Action = Literal["Count", "Ignore", "FailJob"]


@dataclass(slots=True)
class Ledger:
    """State of a job's pods beyond those that still exist."""

    settled: set[str] = field(default_factory=set)  # uids that need no more counting
    vanished: dict[str, Json] = field(default_factory=dict)  # by uid: deleted before they were counted
    succeeded_count: int = 0
    failed_count: int = 0
    done_indexes: set[int] = field(default_factory=set)
    failures_in_a_row: int = 0
    create_after: datetime | None = None

    def succeeded(self, job: Json) -> int:
        """Return how many completions the job has."""
        return len(self.done_indexes) if is_indexed(job) else self.succeeded_count


def is_indexed(job: Json) -> bool:
    """Return whether each completion of the job has its own index."""
    return bool(job["spec"].get("completionMode") == "Indexed")


def index_of(pod: Json) -> int | None:
    """Return the pod's completion index, None where it has none."""
    text = (pod["metadata"].get("annotations") or {}).get(INDEX_KEY, "")
    return int(text) if text.isdigit() else None


def is_active(pod: Json, job: Json) -> bool:
    """Return whether the pod still takes one of the job's places.

    A terminating pod is replaced at once, unless the job asks to wait until it has failed.
    """
    if is_finished(pod):
        return False
    return not is_terminating(pod) or job["spec"].get("podReplacementPolicy") == "Failed"


def action_for(pod: Json, job: Json) -> tuple[Action, str]:
    """Return what a failed pod means for its job, and the message where the job fails by it."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules") or ()
    for number, rule in enumerate(rules):
        why = _rule_match(rule, pod)
        if why:
            action: Action = rule["action"] if rule["action"] in ("Ignore", "FailJob") else "Count"
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            return action, f"{why.format(name=name)} matching {rule['action']} rule at index {number}"
    return "Count", ""


def _rule_match(rule: Json, pod: Json) -> str:
    """Return how the rule matches the pod, "" where it does not."""
    status = pod.get("status") or {}
    for wanted in rule.get("onPodConditions") or ():
        for found in status.get("conditions") or ():
            if found["type"] == wanted["type"] and found["status"] == wanted.get("status", "True"):
                return f"Pod {{name}} has condition {found['type']}"
    codes: Json = rule.get("onExitCodes") or {}
    for container in (status.get("containerStatuses") or ()) if codes else ():
        ended = container.get("state", {}).get("terminated")
        if not ended or ended["exitCode"] == 0 or codes.get("containerName", container["name"]) != container["name"]:
            continue
        if (ended["exitCode"] in codes["values"]) is (codes["operator"] == "In"):
            return f"Container {container['name']} for pod {{name}} failed with exit code {ended['exitCode']}"
    return ""


def backoff_seconds(failures_in_a_row: int) -> float:
    """Return the wait before the next pod after this many consecutive failures."""
    return min(BACKOFF_SECONDS * 2.0 ** (failures_in_a_row - 1), BACKOFF_SECONDS_MAX) if failures_in_a_row else 0.0


def indexes_text(indexes: Iterable[int]) -> str:
    """Return indexes as the status shows them: `0,1,3-5`."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def places_to_fill(job: Json, ledger: Ledger, active: Sequence[Json]) -> list[int | None]:
    """Return the indexes of the pods to create now; None for each pod of a job without indexes."""
    spec = job["spec"]
    parallelism, completions = int(spec.get("parallelism", 1)), spec.get("completions")
    if is_indexed(job):
        taken = {index_of(pod) for pod in active} | ledger.done_indexes
        free: list[int | None] = [index for index in range(completions or 0) if index not in taken]
        return free[: max(0, parallelism - len(active))]
    wanted = parallelism if completions is None else min(parallelism, completions - ledger.succeeded_count)
    if completions is None and ledger.succeeded_count:
        wanted = 0  # a work queue: once one pod has succeeded, no new ones start
    return [None] * max(0, wanted - len(active))


def surplus(job: Json, ledger: Ledger, active: Sequence[Json]) -> list[Json]:
    """Return the pods that are too many after parallelism went down; the youngest go."""
    parallelism, completions = int(job["spec"].get("parallelism", 1)), job["spec"].get("completions")
    allowed = parallelism if completions is None else min(parallelism, completions - ledger.succeeded(job))
    oldest_first = sorted(active, key=lambda pod: int(pod["metadata"]["resourceVersion"]))
    return oldest_first[max(0, allowed) :] if len(active) > max(0, allowed) else []


def pod_for(job: Json, index: int | None) -> Json:
    """Return the pod to create for a job's place."""
    template: Json = clone(job["spec"]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    name = job["metadata"]["name"]
    if index is not None:
        for field_name in ("labels", "annotations"):
            metadata[field_name] = {**(metadata.get(field_name) or {}), INDEX_KEY: str(index)}
        spec["hostname"] = f"{name}-{index}"
        source = {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX_KEY}']"}
        entry = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": source}}
        for container in spec["containers"]:
            container["env"] = [*(container.get("env") or []), entry]
    metadata["generateName"] = f"{name}-" if index is None else f"{name}-{index}-"
    metadata.pop("name", None)
    metadata["ownerReferences"] = [
        {
            "apiVersion": JOBS.api_version,
            "kind": JOBS.kind,
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    return {"metadata": metadata, "spec": spec}


def is_pod_of(pod: Json, job: Json) -> bool:
    """Return whether the job controls the pod."""
    return controller_uid(pod) == str(job["metadata"]["uid"])
