"""Kueue: workloads whose pods are created once a ProvisioningRequest has found capacity for all of them. For runs with
`has_kueue`.

Source: Kueue v0.9.0, pkg/controller/admissionchecks/provisioning (read 2026-11-27). The strings that seed `Random` are
part of each seed's meaning.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import JOBS, POD_TEMPLATES, PRIORITY_CLASSES, PROVISIONING_REQUESTS
from gpu_autoscaler.kube.wire import core, provisioning
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.demands import BEST_EFFORT_ATOMIC, CHECK_CAPACITY
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Entry, Kubernetes, is_true
from gpu_autoscaler.sim.virtual_time import VirtualLoop

NAMESPACE = "research"
CLOSED = ("Failed", "BookingExpired", "CapacityRevoked")  # conditions after which nothing is booked
REQUESTS_PER_HOUR = 12.0
TEMPLATES_SECONDS = (0.5, 20.0)  # from the request to its templates
ADMITTED_SECONDS = (1.0, 60.0)  # from the capacity to the pods
DELETED_SECONDS = 90.0  # from the end of a request to its deletion
RUN_SECONDS = (300.0, 2400.0)
NO_TEMPLATE_RATIO = 0.05  # of requests: a template never comes
ABANDONED_RATIO = 0.15  # of requests: their workload is not started
_CLASSES = (BEST_EFFORT_ATOMIC, BEST_EFFORT_ATOMIC, BEST_EFFORT_ATOMIC, CHECK_CAPACITY)
_POD_SETS = ((1,), (2,), (3,), (1, 2))
_VALID_SECONDS = (600, 1800, None)


def serve_requests(cluster: Kubernetes) -> None:
    """Let the API server serve what Kueue creates."""
    cluster.serve(PROVISIONING_REQUESTS, POD_TEMPLATES, PRIORITY_CLASSES)


@dataclass(slots=True)
class Workload:
    """A workload that asks for capacity."""

    request: provisioning.ProvisioningRequest
    templates: tuple[provisioning.PodTemplate, ...]
    admitted_seconds: float | None  # after its capacity was found; None: it is not started
    run_seconds: float
    jobs: list[core.Job] = field(default_factory=list)
    is_admitted: bool = False


class Kueue:
    """All workloads of a run."""

    def __init__(self, loop: VirtualLoop, workloads: Workloads, rng: random.Random) -> None:
        self._loop, self._workloads, self._cluster, self._rng = loop, workloads, workloads.cluster, rng
        self.workloads: dict[str, Workload] = {}  # by uid of the request
        self._count = 0
        self._is_over = False
        self._cluster.listen(self._on_change)

    def begin(self) -> None:
        """Queue workloads until `stop`."""
        self._loop.call_later(self._rng.expovariate(REQUESTS_PER_HOUR / 3600.0), self._ask)

    def stop(self) -> None:
        """Delete all workloads."""
        self._is_over = True
        for uid in sorted(self.workloads):
            self._delete(uid)

    def _ask(self) -> None:
        """Create a request, and its templates after it."""
        if self._is_over:
            return
        rng = self._rng
        self._count += 1
        name = f"train-{self._count}"
        counts, valid_seconds, class_name = rng.choice(_POD_SETS), rng.choice(_VALID_SECONDS), rng.choice(_CLASSES)
        parameters = {} if valid_seconds is None else {"ValidUntilSeconds": str(valid_seconds)}
        if class_name == CHECK_CAPACITY and rng.random() < 0.5:
            parameters["noRetry"] = "true"
        pod_sets = tuple(
            provisioning.RequestedPods(pod_template_ref=provisioning.Reference(name=f"{name}-{number}"), count=count)
            for number, count in enumerate(counts)
        )
        spec = provisioning.ProvisioningRequestSpec(
            pod_sets=pod_sets, provisioning_class_name=class_name, parameters=parameters
        )
        request = self._cluster.put(
            PROVISIONING_REQUESTS,
            provisioning.ProvisioningRequest(metadata=self._cluster.metadata(NAMESPACE, name), spec=spec),
        )
        gpu_count = rng.choice((1, 1, 1, 2, 4))
        templates = tuple(self._template(pods.pod_template_ref.name, request, gpu_count) for pods in pod_sets)
        admitted_seconds = None if rng.random() < ABANDONED_RATIO else rng.uniform(*ADMITTED_SECONDS)
        uid = request.metadata.uid
        self.workloads[uid] = Workload(request, templates, admitted_seconds, rng.uniform(*RUN_SECONDS))
        shown = templates[:-1] if rng.random() < NO_TEMPLATE_RATIO else templates
        for template in shown:
            self._loop.call_later(rng.uniform(*TEMPLATES_SECONDS), self._create_template, uid, template)
        self.begin()

    def _template(
        self, name: str, request: provisioning.ProvisioningRequest, gpu_count: int
    ) -> provisioning.PodTemplate:
        amounts = {"cpu": "1", "memory": "2Gi", GPU_RESOURCE: str(gpu_count)}
        spec = {
            "containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}],
            "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}],
            "terminationGracePeriodSeconds": 5,
        }
        annotations = {
            labels.CONSUME_PROVISIONING_REQUEST[0]: request.metadata.name,
            labels.PROVISIONING_CLASS[0]: request.spec.provisioning_class_name,
        }
        pods = provisioning.PodTemplateSpec(
            metadata=core.Metadata(name=name, annotations=annotations), spec=msgspec.convert(spec, core.PodSpec)
        )
        return provisioning.PodTemplate(metadata=self._cluster.metadata(NAMESPACE, name), template=pods)

    def _create_template(self, uid: str, template: provisioning.PodTemplate) -> None:
        if uid in self.workloads:
            metadata = replace(template.metadata, creation_timestamp=self._cluster.now())
            self._cluster.put(POD_TEMPLATES, replace(template, metadata=metadata))

    def _on_change(self, plural: str, entry: Entry) -> None:
        """The status of a request says how its workload goes on; a workload ends with its last Job."""
        changed = entry.object
        if isinstance(changed, provisioning.ProvisioningRequest) and not entry.is_deleted:
            workload = self.workloads.get(changed.metadata.uid)
            if workload is not None:
                self._on_status(workload, changed)
        elif plural == JOBS.plural and changed.metadata.namespace == NAMESPACE:
            for uid, workload in self.workloads.items():
                if any(job.metadata.uid == changed.metadata.uid for job in workload.jobs):
                    self._delete_after_last_job(uid, workload)

    def _on_status(self, workload: Workload, request: provisioning.ProvisioningRequest) -> None:
        workload.request, conditions = request, request.status.conditions
        uid, seconds = request.metadata.uid, workload.admitted_seconds
        is_closed = any(is_true(conditions, closed) for closed in CLOSED)
        if is_closed and not workload.jobs:
            self._loop.call_later(DELETED_SECONDS, self._delete, uid)
        elif is_true(conditions, "Provisioned") and seconds is not None and not workload.is_admitted:
            workload.is_admitted = True
            self._loop.call_later(seconds, self._admit, uid)

    def _admit(self, uid: str) -> None:
        """Create the pods: a Job for each pod set, unless the capacity is lost meanwhile."""
        workload = self.workloads.get(uid)
        if workload is None or any(is_true(workload.request.status.conditions, closed) for closed in CLOSED):
            return
        for pods, template in zip(workload.request.spec.pod_sets, workload.templates, strict=True):
            metadata = template.template.metadata
            annotations = {**metadata.annotations, labels.SIMULATED_RUN_SECONDS: str(round(workload.run_seconds, 1))}
            manifest: dict[str, Any] = {
                "metadata": {"name": metadata.name},
                "spec": {
                    "completions": pods.count,
                    "parallelism": pods.count,
                    "template": {
                        "metadata": {"annotations": annotations},
                        "spec": msgspec.to_builtins(template.template.spec),
                    },
                },
            }
            workload.jobs.append(self._workloads.create_job(NAMESPACE, manifest))

    def _delete_after_last_job(self, uid: str, workload: Workload) -> None:
        current = [self._workloads.works.get(job.metadata.uid) for job in workload.jobs]
        if all(work is None or is_true(work.job.status.conditions, "Complete") for work in current):
            self._loop.call_later(DELETED_SECONDS, self._delete, uid)

    def _delete(self, uid: str) -> None:
        workload = self.workloads.pop(uid, None)
        if workload is None:
            return
        for job in workload.jobs:
            if job.metadata.uid in self._workloads.works:
                self._workloads.delete_job(job)
        for template in workload.templates:
            if self._cluster.current(POD_TEMPLATES, template) is not None:
                self._cluster.remove(POD_TEMPLATES, template)
        self._cluster.remove(PROVISIONING_REQUESTS, workload.request)


def is_unserved(request: provisioning.ProvisioningRequest) -> bool:
    """Return whether the request waits for capacity."""
    return not any(is_true(request.status.conditions, known) for known in ("Provisioned", *CLOSED))


def pods_count(request: provisioning.ProvisioningRequest) -> int:
    """Return the number of pods of all pod sets."""
    return sum(pods.count for pods in request.spec.pod_sets)
