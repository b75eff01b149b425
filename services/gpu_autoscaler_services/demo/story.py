"""What happens in the demo, and when: a table of moments in wall seconds after the first one."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest

Door = Literal["nats", "rest"]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the world does to the cluster. Exactly one of the last four fields is set."""

    at_seconds: float  # wall time since the story began
    say: str
    request: JobRequested | None = None
    door: Door = "nats"
    refuse: str | None = None  # the next launch of an offer like this finds no capacity
    send_notice: bool = False  # the cloud takes back a spot node that is busy
    cancel: JobId | None = None


def _job(  # noqa: PLR0913 - a line of the table below reads as a sentence
    name: str, *, model: str | None, gpus: int, run: float, members: int = 1, priority: str = "medium",
    preemptible: bool = True, kind: str = "training", project: str = "research",
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
        run_seconds=run,
    )


STORY: Sequence[Moment] = (
    Moment(
        at_seconds=0,
        say="an empty cluster gets its first job, through NATS",
        request=_job("bert-finetune", model="A10G", gpus=1, run=480),
    ),
    Moment(
        at_seconds=1,
        say="an urgent one comes through REST, and must not run on spot",
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
        door="rest",
    ),
    Moment(
        at_seconds=2,
        say="a gang of four members waits until all of them have room",
        request=_job("llm-pretrain", model="A100", gpus=8, run=600, members=4, priority="high"),
    ),
    Moment(at_seconds=6, say="the cloud runs out of what will be asked for next", refuse="g4dn.12xlarge/*"),
    Moment(
        at_seconds=7,
        say="batch work comes while the cloud has a shortage",
        request=_job("embed-corpus", model="T4", gpus=4, run=300, priority="low", kind="batch", project="search"),
    ),
    *(
        Moment(
            at_seconds=10 + 0.3 * number,
            say=f"sweep trial {number} of 6",
            request=_job(f"sweep-{number}", model="T4", gpus=1, run=200 + 20 * number, priority="low", kind="batch"),
            door="rest" if number % 2 else "nats",
        )
        for number in range(1, 7)
    ),
    Moment(
        at_seconds=16,
        say="somebody asks for a job and thinks better of it",
        request=_job("typo-in-config", model="L4", gpus=1, run=3000),
    ),
    Moment(at_seconds=20, say="and cancels it", cancel=JobId("typo-in-config")),
    Moment(at_seconds=26, say="the cloud takes a busy spot node back", send_notice=True),
)
# What a cloud does not sell goes by what comes nearest there: GPU models of the story, and the offer that is refused.
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "azure": {"A10G": "A10", "L4": "A10", "L40S": "A100", "g4dn.12xlarge/*": "Standard_NC64as_T4_v3/*"},
    "gcp": {"A10G": "L4", "L40S": "A100", "g4dn.12xlarge/*": "n1-standard-32/*"},
}
JOBS_COUNT = sum(1 for moment in STORY if moment.request is not None)


def story_of(cloud: str) -> Sequence[Moment]:
    """Return the story in the words of what this cloud sells."""
    return [_moment_of(moment, ELSEWHERE.get(cloud, {})) for moment in STORY]


def _moment_of(moment: Moment, instead: Mapping[str, str]) -> Moment:
    if moment.refuse is not None:
        return msgspec.structs.replace(moment, refuse=instead.get(moment.refuse, moment.refuse))
    if moment.request is None:
        return moment
    needs = moment.request.gpu_requirements
    if isinstance(needs.gpu_type, str):
        needs = msgspec.structs.replace(needs, gpu_type=instead.get(needs.gpu_type, needs.gpu_type))
    return msgspec.structs.replace(moment, request=msgspec.structs.replace(moment.request, gpu_requirements=needs))
