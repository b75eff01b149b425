"""Pod templates on a real API server: their schema, and that jobs of every kind keep each field of a template."""

from pathlib import Path
from typing import Any

import pytest
from tests.controlplane.definitions import needed_definition
from tests.controlplane.fixtures import kube, outside, plane
from tests.controlplane.plane import ControlPlane
from tests.controlplane.pod_schema import encoded as encoded_schema
from tests.controlplane.pod_schema import pod_schema
from tests.support.kube_http import KubeHttp
from tests.support.pod_templates import Template, admitted, changed, lacking, template
from tests.support.stories import T0, given, node

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.pod_templates import schema
from gpu_autoscaler.kube.pod_templates.admission import Admitted
from gpu_autoscaler.kube.translate.workload_progress import KINDS
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import GpuRequirements, Runtime
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm
from gpu_autoscaler_services.scheduler.binder import Binder, InvalidJob

__all__ = ["kube", "outside", "plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

WHERE = ("n1", "n2")
CORE = "/api/v1/namespaces/default"


async def test_the_schema_is_that_of_the_api_server(outside: KubeHttp) -> None:
    """A later Kubernetes has other fields: `python -m tests.controlplane.pod_schema` writes the file again."""
    written = (Path(schema.__file__).parent / schema.FILE_NAME).read_text(encoding="utf-8")
    assert encoded_schema(await pod_schema(outside)) == written


@pytest.fixture(params=list(Runtime))
async def runtime(request: pytest.FixtureRequest, plane: ControlPlane, outside: KubeHttp) -> Runtime:
    """A kind of job, installed."""
    runtime = Runtime(request.param)
    kind = KINDS[runtime]
    if kind.is_optional:
        plane.kubectl("apply", "--server-side", "-f", str(needed_definition(kind.crd)))
        await outside.until(kind.path(), lambda answer: str(answer.get("kind")).endswith("List"))
    return runtime


def whole(name: str, runtime: Runtime, pod_template: Template | None = None) -> tuple[Admitted, ClusterState]:
    """Return an accepted gang of two with the full template, and the state with its nodes."""
    nodes = (node(each, labels={"rack": "r1", "disk": "nvme"}) for each in WHERE)
    own = pod_template or template("pytorch" if runtime is Runtime.PYTORCHJOB else "main")
    gpus = GpuRequirements(gpu_count=8, gpu_type=("H100", "A100"))
    job = admitted(own, job_id=JobId(name), members=2, runtime=str(runtime), gpu_requirements=gpus, preemptible=False)
    return job, given(*nodes)


def placed(job: Admitted) -> JobPlaced:
    """Return the placement on both nodes."""
    uids = tuple(NodeUid(name) for name in WHERE)
    return JobPlaced(job_id=job.spec.job_id, attempt=1, node_uids=uids, node_names=WHERE, placed_at=T0)


def templates(thing: Any) -> list[Template]:  # noqa: ANN401 - JSON
    """Return every pod template in an object."""
    if isinstance(thing, list):
        return [found for each in thing for found in templates(each)]
    if not isinstance(thing, dict):
        return []
    inside = [found for each in thing.values() for found in templates(each)]
    return [thing, *inside] if "containers" in thing.get("spec", {}) else inside


async def test_a_job_of_each_kind_keeps_every_field(outside: KubeHttp, kube: KubeClient, runtime: Runtime) -> None:
    """Created and released with our fields merged in; nothing of the template is lost or replaced."""
    job, state = whole(f"kept-{runtime}", runtime)
    binder = Binder(kube, "default")
    await binder.create(job.spec, state, job.template)
    await binder.release(job.spec, placed(job), state, job.template)

    made = await outside.read(KINDS[runtime].path("default", job.spec.job_id))

    wanted = job.template
    assert wanted is not None
    if runtime is Runtime.RAYJOB:  # its container runs Ray: what it is to run is the entrypoint
        assert made["spec"]["entrypoint"] == "python train.py --epochs 3"
        first = wanted["spec"]["containers"][0]
        del first["command"], first["args"]
    found = templates(made)
    assert len(found) == (2 if runtime in (Runtime.PYTORCHJOB, Runtime.RAYJOB) else 1)
    for each in found:
        assert lacking(each, {**wanted, "spec": {**wanted["spec"], "affinity": {}}}) == []
        affinity = each["spec"]["affinity"]
        assert lacking(affinity["podAntiAffinity"], wanted["spec"]["affinity"]["podAntiAffinity"]) == []
        nodes = affinity["nodeAffinity"]
        terms = nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        keys = [{condition["key"] for condition in term["matchExpressions"]} for term in terms]
        assert all("rack" in each_keys and len(each_keys) > 1 for each_keys in keys), "the template's term and ours"
        assert each["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert each["metadata"]["labels"][labels.JOB_ID] == job.spec.job_id
        assert [toleration["key"] for toleration in each["spec"]["tolerations"]] == [
            "team",
            "nvidia.com/gpu",
            "gpu",
            "gpu-autoscaler.io/avoid",
        ]


async def test_a_member_is_admitted_as_a_pod(outside: KubeHttp, kube: KubeClient) -> None:
    """The Job controller makes pods of the template: the API server checks them more strictly than the template."""
    job, state = whole("as-pod", Runtime.JOB, without("runtimeClassName"))
    await Binder(kube, "default").create(job.spec, state, job.template)
    made = await outside.read(KINDS[Runtime.JOB].path("default", "as-pod"))
    pod = {"metadata": {**made["spec"]["template"]["metadata"], "name": "p"}, "spec": made["spec"]["template"]["spec"]}
    answer = await outside.send("POST", f"{CORE}/pods?dryRun=All&fieldValidation=Strict", pod)
    assert answer.status == 201, answer


def without(name: str) -> Template:
    """Return the full template without a field of its spec."""
    own = template()
    del own["spec"][name]
    return own


async def test_what_only_the_server_knows_ends_the_job_with_its_words(kube: KubeClient) -> None:
    """The schema has no values: a pull policy that does not exist is the server's to refuse."""
    job, state = whole("refused", Runtime.JOB, changed("spec.containers.0.imagePullPolicy", "Sometimes"))
    with pytest.raises(InvalidJob, match="imagePullPolicy"):
        await Binder(kube, "default").create(job.spec, state, job.template)


async def test_the_zone_of_a_bound_claim_is_known_before_the_pods(outside: KubeHttp, kube: KubeClient) -> None:
    """The scheduler reads claim and volume; a claim that does not exist has no node."""
    binder = Binder(kube, "default")
    job, _ = whole("zoned", Runtime.JOB)
    assert job.template is not None
    assert "claim default/datasets does not exist" in (await binder.volumes(job.template)).problem
    reach = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-b"]}
    volume = {
        "metadata": {"name": "pv-1"},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadOnlyMany"],
            "csi": {"driver": "disk.example", "volumeHandle": "v-1"},
            "claimRef": {"namespace": "default", "name": "datasets"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [reach]}]}},
        },
    }
    claim = {
        "metadata": {"name": "datasets"},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "resources": {"requests": {"storage": "1Ti"}},
            "storageClassName": "",
        },
    }
    await outside.made(f"{CORE}/persistentvolumeclaims", claim)
    unbound = await binder.volumes(job.template)
    assert (unbound.problem, unbound.alternatives) == ("", ()), "it waits for a volume; any node may do"
    await outside.made("/api/v1/persistentvolumes", volume)
    await outside.patched(f"{CORE}/persistentvolumeclaims/datasets", {"spec": {"volumeName": "pv-1"}})
    ((term,),) = (await binder.volumes(job.template)).alternatives
    assert term == NodeSelectorTerm((LabelRequirement(labels.ZONE, "In", ("zone-b",)),))
