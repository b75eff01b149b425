"""The demo's scenario: a table of events in wall seconds after the first one.

Two teams share 45 GPUs (`policy.toml`). Research borrows what product does not use; product takes it back.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest

Input = Literal["nats", "rest"]
_SAVES = {labels.CHECKPOINTED_AT: ""}  # annotation of pods that save on request


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the scenario. Exactly one of request, refuse, send_notice, shows_queue and cancel is set."""

    at_seconds: float  # wall time since the start; all later events are shifted by the wait for `after`
    after: JobId | None = None  # waits until this job runs
    line: str  # printed when it happens
    request: JobRequested | None = None
    input: Input = "nats"
    client: str = ""  # whom the broker identifies; empty: a trusted publisher
    refused_as: str = ""  # the problem type with which the gateway must refuse the request; empty: it is accepted
    refuse: str | None = None  # the next launch of a matching offer is refused for lack of capacity
    send_notice: bool = False  # the cloud reclaims a busy spot node
    shows_queue: bool = False  # print why each job waits
    cancel: JobId | None = None


def _job(  # noqa: PLR0913 - keeps the table below readable
    name: str, *, model: str | None, gpus: int, run: float, members: int = 1, priority: str = "medium",
    preemptible: bool = True, kind: str = "training", project: str = "research", saves: bool = False,
) -> JobRequested:  # fmt: skip
    return JobRequested(
        job_id=JobId(name),
        job_name=name,
        project_id=project,
        priority=priority,
        gpu_requirements=GpuRequirements(gpu_type=model, gpu_count=gpus),
        container=ContainerRequest(image=f"registry.example/{kind}:1", command=("python", f"{kind}.py")),
        resources=ResourceRequest(cpu=str(4 * max(gpus, 1)), memory=f"{16 * max(gpus, 1)}Gi"),
        members=members,
        preemptible=preemptible,
        workload_type=kind,
        pod_annotations=_SAVES if saves else {},
        run_seconds=run,
    )


STORY: Sequence[Moment] = (
    Moment(
        at_seconds=0,
        line="research: first job of an empty cluster, submitted through NATS",
        request=_job("bert-finetune", model="A10G", gpus=1, run=480),
    ),
    Moment(
        at_seconds=1,
        line="product: high-priority job, submitted through REST, not allowed on spot",
        request=_job(
            "serve-llama",
            model="L40S",
            gpus=2,
            run=420,
            priority="high",
            preemptible=False,
            kind="inference",
            project="product",
        ),
        input="rest",
    ),
    Moment(
        at_seconds=2,
        line="research: gang of four members, which starts when capacity for all of them is free",
        request=_job("llm-pretrain", model="A100", gpus=8, run=600, members=4, priority="high"),
    ),
    Moment(
        at_seconds=3,
        line="research: job that will be canceled",
        request=_job("typo-in-config", model="L4", gpus=1, run=3000),
    ),
    Moment(
        at_seconds=6, line="the cloud runs out of capacity for the offer that is needed next", refuse="g4dn.12xlarge/*"
    ),
    Moment(
        at_seconds=7,
        line="product: batch job during the capacity shortage",
        request=_job("embed-corpus", model="T4", gpus=4, run=300, priority="low", kind="batch", project="product"),
    ),
    Moment(at_seconds=8, line="research: cancellation of typo-in-config", cancel=JobId("typo-in-config")),
    *(
        Moment(
            at_seconds=10 + 0.3 * number,
            line=f"research: sweep trial {number} of 6, the last five with quota borrowed from product",
            request=_job(
                f"sweep-{number}", model="T4", gpus=1, run=260 + 20 * number, priority="low", kind="batch", saves=True
            ),
            input="rest" if number % 2 else "nats",
        )
        for number in range(1, 7)
    ),
    Moment(
        at_seconds=14,
        line="research: job of 64 GPUs, more than both teams have together",
        request=_job("llm-dream", model="A100", gpus=8, run=600, members=8),
        input="rest",
        refused_as="quota-exceeded",
    ),
    Moment(
        at_seconds=15,
        line="research: job in product's project, submitted through NATS with research's own user",
        request=_job("not-ours", model="T4", gpus=1, run=60, project="product"),
        client="research",
        refused_as="right-missing",
    ),
    Moment(
        at_seconds=20,
        after=JobId("sweep-6"),
        line="product: two members within its quota, which research has borrowed",
        request=_job("rank-eval", model="T4", gpus=1, run=120, members=2, kind="batch", project="product"),
    ),
    Moment(at_seconds=26, line="the cloud reclaims a busy spot node", send_notice=True),
    Moment(at_seconds=27, line="what waits, and how much GPU time its team had lately", shows_queue=True),
)
# Substitutes for GPU models, and for the refused offer, that a cloud does not have.
SUBSTITUTES: Mapping[str, Mapping[str, str]] = {
    "azure": {"A10G": "A10", "L4": "A10", "L40S": "A100", "g4dn.12xlarge/*": "Standard_NC64as_T4_v3/*"},
    "gcp": {"A10G": "L4", "L40S": "A100", "g4dn.12xlarge/*": "n1-standard-32/*"},
}
JOBS_COUNT = sum(1 for moment in STORY if moment.request is not None and not moment.refused_as)


def story_of(cloud: str) -> Sequence[Moment]:
    """Return the scenario with GPU models and offers of this cloud."""
    return [_moment_of(moment, SUBSTITUTES.get(cloud, {})) for moment in STORY]


def _moment_of(moment: Moment, substitutes: Mapping[str, str]) -> Moment:
    if moment.refuse is not None:
        return msgspec.structs.replace(moment, refuse=substitutes.get(moment.refuse, moment.refuse))
    if moment.request is None:
        return moment
    needs = moment.request.gpu_requirements
    if isinstance(needs.gpu_type, str):
        needs = msgspec.structs.replace(needs, gpu_type=substitutes.get(needs.gpu_type, needs.gpu_type))
    return msgspec.structs.replace(moment, request=msgspec.structs.replace(moment.request, gpu_requirements=needs))
