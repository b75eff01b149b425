"""What the scheduler does with the kind of object that a job wants its members made by. A simulated API server."""

import msgspec
from tests.services.scheduler.test_service import TRAIN, Desk, desk, listing
from tests.support.stories import job, node, request

from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRejected
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.simcluster.kinds import SERVICES

__all__ = ["desk"]


async def test_a_request_for_a_kind_that_is_not_installed_is_refused(desk: Desk) -> None:
    """Nothing is kept; the refusal names the definition that is missing."""
    asked = request("train", runtime="jobset")
    outcome = await desk.hear(asked)
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    (mistake,) = rejected.mistakes
    assert mistake.field == "runtime"
    assert "jobsets.jobset.x-k8s.io" in mistake.reason
    assert await desk.store.job(TRAIN) is None


async def test_an_accepted_job_whose_kind_is_gone_fails_and_says_so(desk: Desk) -> None:
    """The gateway accepted it, or the definition went since: it ends, as no accepted job is lost."""
    queued = await desk.accepted()
    asked = msgspec.structs.replace(queued, spec=msgspec.structs.replace(queued.spec, runtime=Runtime.JOBSET))
    (finished,) = (await desk.hear(asked)).facts
    assert isinstance(finished, JobFinished)
    assert finished.outcome == "failed"
    assert "jobsets.jobset.x-k8s.io" in finished.message


async def test_a_list_of_one_kind_says_nothing_of_jobs_of_another(desk: Desk) -> None:
    """A JobSet is not missing because no Kubernetes Job is listed."""
    desk.knows(job("train", runtime=Runtime.JOBSET, placed_on=("n1",), is_running=True), node("n1"))
    assert (await desk.hear(listing())).facts == ()
    (finished,) = (await desk.hear(msgspec.structs.replace(listing(), runtime=Runtime.JOBSET))).facts
    assert isinstance(finished, JobFinished)


async def test_members_of_a_gang_find_each_other_by_name(desk: Desk) -> None:
    """A headless Service of the Job's own, made once; each member is told where the first one is, unless the request
    says so itself."""
    queued = (await desk.hear(request("train", members=3))).facts[0]
    assert isinstance(queued, JobQueued)
    await desk.hear(queued)
    await desk.hear(queued)
    (service,) = desk.here.world.api.objects(SERVICES, None)
    job_made = desk.here.item("jobs", "train")
    template = job_made["spec"]["template"]["spec"]
    told = {each["name"]: each.get("value") for each in template["containers"][0]["env"]}

    assert service["metadata"]["ownerReferences"][0]["uid"] == job_made["metadata"]["uid"]
    assert service["spec"]["clusterIP"] == "None"
    assert template["subdomain"] == service["metadata"]["name"] == "gang-train"
    assert (told["MASTER_ADDR"], told["WORLD_SIZE"]) == ("train-0.gang-train", "3")


async def test_a_runtime_is_told_what_it_lacks(desk: Desk) -> None:
    """An unknown one with the nearest known, an id that names of pods cannot be made of, a RayJob without a command."""
    for asked, field, word in (
        (request("train", runtime="pytorch"), "runtime", "did you mean pytorchjob?"),
        (request("1-train", runtime="jobset"), "job_id", "begin with a letter"),
        (request("train", runtime="rayjob"), "container.command", "entrypoint"),
    ):
        (rejected,) = (await desk.hear(asked)).facts
        assert isinstance(rejected, JobRejected)
        (mistake,) = rejected.mistakes
        assert mistake.field == field
        assert word in mistake.reason
