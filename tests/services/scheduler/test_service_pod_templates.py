"""The scheduler and pod templates: kept in the store, made into the Job, refused, lost."""

from collections.abc import Mapping
from datetime import timedelta

import msgspec
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as some
from tests.services.scheduler.test_service import TRAIN, Bench
from tests.services.scheduler.test_service import bench as bench  # noqa: PLC0414 - a fixture
from tests.support.pod_templates import Template, admitted, changed, lacking, template, templated
from tests.support.stories import T0, TimedFact, given, node

from gpu_autoscaler.core.intake.fold import apply_to_job
from gpu_autoscaler.core.state.state import JobRecord
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobQueued, JobRejected, JobRequested
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.jobs import GpuRequirements, Runtime, template_digest
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.simcluster.kinds import CLAIMS, VOLUMES
from gpu_autoscaler_services.scheduler import job_kinds
from gpu_autoscaler_services.scheduler.manifest import job_manifest, pod_template

ZONE = "topology.kubernetes.io/zone"
PLACED = JobPlaced(job_id=TRAIN, attempt=1, node_uids=(NodeUid("u"),), node_names=("gpu-a",), placed_at=T0)


def simple(**changes: object) -> Template:
    """Return the full template without claims, and with these fields of its spec."""
    own = template()
    spec = own["spec"]
    spec["volumes"] = [volume for volume in spec["volumes"] if "persistentVolumeClaim" not in volume]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["volumeMounts"] = [each for each in container.get("volumeMounts", ()) if each["name"] != "data"]
    return {**own, "spec": {**spec, **changes}}


async def queued_by(bench: Bench, own: Template) -> JobQueued:
    """Admit a job with this template and record it."""
    outcome = await bench.handle(templated(own))
    (queued,) = outcome.facts
    assert isinstance(queued, JobQueued), outcome
    bench.record_story((TimedFact(queued, T0),))
    return queued


async def test_the_template_is_stored_and_made_into_the_job(bench: Bench) -> None:
    """The fact has its digest alone; the Job has every field, created and released."""
    queued = await queued_by(bench, simple())
    text = await bench.store.job_template(TRAIN)
    assert text is not None
    assert queued.spec.template_digest == template_digest(msgspec.json.decode(text))
    assert b"secret-value" not in msgspec.json.encode(queued)
    await bench.handle(queued)
    await bench.handle(PLACED)
    made = bench.here.item("jobs", "train")
    assert made["spec"]["suspend"] is False
    wanted = simple()
    affinity = wanted["spec"].pop("affinity")
    assert lacking(made["spec"]["template"], wanted) == []
    kept = made["spec"]["template"]["spec"]["affinity"]
    assert lacking(kept["podAntiAffinity"], affinity["podAntiAffinity"]) == []
    preferred = kept["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [each["weight"] for each in preferred] == [100, 7]


async def test_every_violation_is_in_the_rejection(bench: Bench) -> None:
    """Nothing is stored; a trusted publisher may allow dangerous fields."""
    own = simple(hostNetwork=True, hostPID=True)
    outcome = await bench.handle(templated(own))
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    fields = [violation.field for violation in rejected.violations]
    assert fields == ["pod_template.spec.hostNetwork", "pod_template.spec.hostPID"]
    assert outcome.set_aside_reason
    assert await bench.store.job(TRAIN) is None
    (queued,) = (await bench.handle(templated(own, dangerous_fields_allowed=True))).facts
    assert isinstance(queued, JobQueued)


async def test_a_lost_template_ends_the_job(bench: Bench) -> None:
    """A store from a backup may lack it: the image alone must not run."""
    queued = await queued_by(bench, simple())
    other = msgspec.structs.replace(queued, spec=msgspec.structs.replace(queued.spec, template_digest="0" * 32))
    (end,) = (await bench.handle(other)).facts
    assert isinstance(end, JobFinished)
    assert (end.outcome, "submit the job again" in end.message) == ("failed", True)
    assert not bench.here.item("jobs", "train")


async def test_the_zone_of_a_claim_is_a_demand_of_the_job(bench: Bench) -> None:
    """Nodes are bought before a pod exists: in the zone of the volume. A claim that does not exist is a violation."""
    outcome = await bench.handle(templated())
    (rejected,) = outcome.facts
    assert isinstance(rejected, JobRejected)
    (violation,) = rejected.violations
    assert violation.field == "pod_template.spec.volumes"
    assert "claim default/datasets does not exist; create it" in violation.reason
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["zone-b"]}]}
    volume = {"capacity": {"storage": "1Gi"}, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}
    create = bench.here.world.api.create
    create(VOLUMES, None, {"metadata": {"name": "pv"}, "spec": volume})
    create(CLAIMS, "default", {"metadata": {"name": "datasets"}, "spec": {"volumeName": "pv"}})
    queued = await queued_by(bench, template())
    rack = LabelRequirement("rack", "In", ("r1", "r2"))
    zone = LabelRequirement(ZONE, "In", ("zone-b",))
    assert queued.spec.demands.node_affinity == (NodeSelectorTerm((rack, zone)),)


async def test_a_promised_job_is_queued_without_its_claim(bench: Bench) -> None:
    """The gateway has answered 202 and stored it; its pods tell what their claim lacks."""
    job = admitted()
    request = templated()
    await bench.store.accept_job(
        job.spec, request_digest=request_digest(request), accepted_at=T0, template=job.template_bytes
    )
    (queued,) = (await bench.handle(request)).facts
    assert isinstance(queued, JobQueued)


async def test_a_repeated_request_is_the_same_job_and_another_template_a_conflict(bench: Bench) -> None:
    """The template is part of a request's identity."""
    queued = await queued_by(bench, simple())
    assert (await bench.handle(templated(simple()))).facts == (queued,)
    (rejected,) = (await bench.handle(templated(simple(terminationGracePeriodSeconds=1)))).facts
    assert isinstance(rejected, JobRejected)
    assert "another body" in rejected.violations[0].reason


def test_the_state_keeps_a_digest_of_the_request_only() -> None:
    """Its identity stays: a repeat is known, though the state has no template."""
    request = templated()
    record = apply_to_job(JobRecord(), request, T0 + timedelta(seconds=1))
    assert isinstance(record.requested, JobRequested)
    assert record.requested.pod_template is None
    assert b"secret-value" not in msgspec.json.encode(record)
    assert request_digest(record.requested) == request_digest(request)
    assert request_digest(templated(changed("spec.hostIPC", False))) != request_digest(request)


NAMES = some.sampled_from(["rack", "disk", "team", "zone"])
TERMS = some.lists(
    some.fixed_dictionaries(
        {
            "matchExpressions": some.lists(
                some.fixed_dictionaries({"key": NAMES, "operator": some.just("Exists")}), min_size=1, max_size=2
            )
        }
    ),
    min_size=1,
    max_size=3,
)
EXTRAS = some.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": some.dictionaries(NAMES, some.just("v"), max_size=2),
        "tolerations": some.lists(some.fixed_dictionaries({"key": NAMES, "operator": some.just("Exists")}), max_size=2),
        "affinity": some.fixed_dictionaries(
            {
                "nodeAffinity": some.fixed_dictionaries(
                    {
                        "requiredDuringSchedulingIgnoredDuringExecution": some.fixed_dictionaries(
                            {"nodeSelectorTerms": TERMS}
                        )
                    }
                )
            }
        ),
        "hostAliases": some.just([{"ip": "10.0.0.1", "hostnames": ["data"]}]),
        "dnsPolicy": some.sampled_from(["ClusterFirst", "Default"]),
    },
)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@settings(max_examples=150, deadline=None)
@over(
    extras=EXTRAS,
    gpus=some.integers(0, 8),
    members=some.integers(1, 3),
    models=some.sampled_from([None, "A100", ("H100", "A100")]),
    preemptible=some.booleans(),
    runtime=some.sampled_from(list(Runtime)),
)
def test_merging_loses_nothing_and_adds_our_demands(
    extras: Template,
    gpus: int,
    members: int,
    models: str | tuple[str, ...] | None,
    preemptible: bool,  # noqa: FBT001 - by name
    runtime: Runtime,
) -> None:
    """Whatever the template and the request demand, members get both: every term of the template with one of ours."""
    own = template("pytorch")
    own["spec"] = {name: value for name, value in own["spec"].items() if name not in extras} | extras
    requirements = GpuRequirements(gpu_count=gpus, gpu_type=models if gpus else None)
    job = admitted(own, gpu_requirements=requirements, members=members, preemptible=preemptible, runtime=str(runtime))
    merged = pod_template(job.spec, given(node("n1")), job.template, node_names=("n1",))
    assert job.template is not None
    before = {**job.template, "spec": {**job.template["spec"], "affinity": {}}}
    assert lacking(merged, before) == []
    given_terms = own["spec"].get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms", [])
    nodes = merged["spec"]["affinity"]["nodeAffinity"]
    terms = nodes.get(REQUIRED, {}).get("nodeSelectorTerms", [])
    for term in terms:
        assert not given_terms or any(not lacking(term, wanted) for wanted in given_terms)
        assert not preemptible or models is None or gpus == 0 or "A100" in str(term)
    for wanted in given_terms:
        assert any(not lacking(term, wanted) for term in terms)
    limits = merged["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    variables = [variable["name"] for variable in merged["spec"]["containers"][0]["env"]]
    assert ("RANK" in variables) == (members > 1 and runtime is Runtime.JOB)


def test_an_own_rendezvous_stays() -> None:
    """Kubernetes uses the last of equal names; the template's is the only one."""
    own = changed("spec.containers.0.env", [{"name": "MASTER_PORT", "value": "1"}])
    job = admitted(own, members=2)
    made = job_manifest(job.spec, given(node("n1")), job.template)
    env = made["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [each["name"] for each in env] == ["MASTER_ADDR", "RANK", "WORLD_SIZE", "MASTER_PORT"]


def test_a_released_jobset_keeps_the_selector_of_its_template() -> None:
    """Its webhook allows changes of the selector: ours is added to the template's."""
    job = admitted(members=2, within="rack", runtime="jobset")
    state = given(node("n1", labels={"rack": "r1"}))
    patch = job_kinds.release_jobset(job.spec, ("n1",), state, job.template)
    assert not isinstance(patch, Mapping)
    suspend, selector = patch
    assert suspend["value"] is False
    assert selector["value"] == {"disk": "nvme", "rack": "r1"}
