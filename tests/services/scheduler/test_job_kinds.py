"""Jobs of each runtime at the scheduler's inputs. A simulated API server."""

import msgspec
from tests.services.scheduler.test_service import TRAIN, Bench, bench, listing
from tests.support.stories import job, node, request

from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRejected
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.simcluster.kinds import SERVICES

__all__ = ["bench"]


async def test_request_for_missing_kind_is_rejected(bench: Bench) -> None:
    """Nothing is stored; the rejection names the missing definition."""
    asked = request("train", runtime="jobset")
    outcome = await bench.handle(asked)
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    (violation,) = rejected.violations
    assert violation.field == "runtime"
    assert "jobsets.jobset.x-k8s.io" in violation.reason
    assert await bench.store.job(TRAIN) is None


async def test_accepted_job_of_missing_kind_fails(bench: Bench) -> None:
    """Accepted by the gateway, or the definition was removed since: the job ends, it is never lost."""
    queued = await bench.accepted()
    asked = msgspec.structs.replace(queued, spec=msgspec.structs.replace(queued.spec, runtime=Runtime.JOBSET))
    (finished,) = (await bench.handle(asked)).facts
    assert isinstance(finished, JobFinished)
    assert finished.outcome == "failed"
    assert "jobsets.jobset.x-k8s.io" in finished.message


async def test_list_of_one_kind_ignores_other_kinds(bench: Bench) -> None:
    """A JobSet is not missing because no Kubernetes Job is listed."""
    bench.record_story(job("train", runtime=Runtime.JOBSET, placed_on=("n1",), is_running=True), node("n1"))
    assert (await bench.handle(listing())).facts == ()
    (finished,) = (await bench.handle(msgspec.structs.replace(listing(), runtime=Runtime.JOBSET))).facts
    assert isinstance(finished, JobFinished)


async def test_gang_members_have_service_and_rendezvous(bench: Bench) -> None:
    """A headless Service owned by the Job, created once; each member gets the address of the first."""
    queued = (await bench.handle(request("train", members=3))).facts[0]
    assert isinstance(queued, JobQueued)
    await bench.handle(queued)
    await bench.handle(queued)
    (service,) = bench.here.world.api.objects(SERVICES, None)
    job_made = bench.here.item("jobs", "train")
    template = job_made["spec"]["template"]["spec"]
    variables = {item["name"]: item.get("value") for item in template["containers"][0]["env"]}

    assert service["metadata"]["ownerReferences"][0]["uid"] == job_made["metadata"]["uid"]
    assert service["spec"]["clusterIP"] == "None"
    assert template["subdomain"] == service["metadata"]["name"] == "gang-train"
    assert (variables["MASTER_ADDR"], variables["WORLD_SIZE"]) == ("train-0.gang-train", "3")


async def test_runtime_violations_are_reported(bench: Bench) -> None:
    """An unknown runtime with the nearest known one, an unusable id, a RayJob without a command."""
    for asked, field, word in (
        (request("train", runtime="pytorch"), "runtime", "did you mean pytorchjob?"),
        (request("1-train", runtime="jobset"), "job_id", "start with a letter"),
        (request("train", runtime="rayjob"), "container.command", "entrypoint"),
    ):
        (rejected,) = (await bench.handle(asked)).facts
        assert isinstance(rejected, JobRejected)
        (violation,) = rejected.violations
        assert violation.field == field
        assert word in violation.reason
