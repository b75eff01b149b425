"""Offers of Google managed instance groups, groups that are not used, and their preflight findings."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.provider.contract import OURS
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.gcp.client import PREFIXES
from gpu_autoscaler.providers.gcp.permissions import CALLS, role_text
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler_services.cli.main import run

pytestmark = pytest.mark.timeout(180)

SPOT = "g2-standard-4-spot"
WHERE = ("europe-west4-a", SPOT)


@pytest.fixture
async def project() -> AsyncIterator[Project]:
    """A served project with a group for each offer."""
    async with served_project() as served:
        yield served


async def examined(project: Project, /, **changes: object) -> dict[str, Finding]:
    """What an examination finds, by subject; of several about one thing the first."""
    provider = project.provider(OURS, **changes)
    found: dict[str, Finding] = {}
    for finding in await provider.preflight():
        found.setdefault(finding.subject, finding)
    await provider.close()
    return found


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"status": {"autoscaler": "https://x/autoscalers/a"}}, "its own autoscaler"),
        ({"instanceLifecyclePolicy": {"defaultActionOnFailure": "REPAIR"}}, "defaultActionOnFailure to DO_NOTHING"),
        ({"versions": [{"instanceTemplate": "a"}, {"instanceTemplate": "b"}]}, "several templates"),
        ({"distributionPolicy": {"zones": []}}, "it is regional"),
        ({"instanceTemplate": "https://x/global/instanceTemplates/gone"}, "template does not exist"),
    ],
)
@pytest.mark.cloud("gcp", errors=("group with an autoscaler", "group with repair"))
async def test_a_group_that_acts_on_its_own_is_not_used(
    project: Project, told: dict[str, object], problem: str
) -> None:
    """It has no offers, orders are refused with the reason, and nothing is requested from the cloud."""
    buyer = project.provider(OURS, groups=(f"*={'/'.join(WHERE)}",))
    (offer,) = await buyer.offers()
    project.fake.machines.groups[WHERE].described = told
    assert not await buyer.offers()
    order = Order(action_id=ActionId("a1"), installation=OURS, pool="default", offer=offer, labels=(), taints=())
    with pytest.raises(LaunchRefused, match=problem) as refused:
        await buyer.launch(order)
    await buyer.close()
    assert refused.value.kind == "configuration"
    assert not project.fake.asked_of("instanceGroupManagers.createInstances")
    found = await examined(project, groups=(f"*={'/'.join(WHERE)}",))
    assert found[f"gcp.groups {'/'.join(WHERE)}"].level == "error"


async def test_a_group_with_an_autoscaler_can_be_shared(project: Project) -> None:
    """Used like any other, with a warning; an unknown name is refused."""
    project.fake.machines.groups[WHERE].described = {"status": {"autoscaler": "https://x/autoscalers/a"}}
    name = "/".join(WHERE)
    buyer = project.provider(OURS, groups=(f"*={name}",), shared_groups=(name,))
    (offer,) = await buyer.offers()
    order = Order(action_id=ActionId("a1"), installation=OURS, pool="default", offer=offer, labels=(), taints=())
    made = await buyer.launch(order)
    said = [one for one in await buyer.preflight() if one.subject == f"gcp.groups {name}"]
    await buyer.close()
    assert made.action_id == "a1"
    assert [one.level for one in said if "its autoscaler" in one.next_step] == ["warning"]
    with pytest.raises(ConfigError, match=r"gcp\.shared_groups: 'europe-west4-a/other' is not in gcp\.groups"):
        project.provider(OURS, groups=(f"*={name}",), shared_groups=("europe-west4-a/other",))


async def test_a_group_without_a_zone_stands_for_those_of_the_region(project: Project) -> None:
    """One offer for each zone with such a group; it launches there, and the end of an instance is seen."""
    buyer = project.provider(OURS, groups=(f"*={SPOT}",), region="europe-west4")
    offers = {offer.zone: offer for offer in await buyer.offers()}
    zones = {zone for zone, name in project.fake.machines.groups if name == SPOT}
    offer = offers["europe-west4-b"]
    order = Order(action_id=ActionId("a1"), installation=OURS, pool="default", offer=offer, labels=(), taints=())
    instance = await buyer.launch(order)
    await buyer.terminate(instance.provider_id, now=project.clock.now())
    (ended,) = await buyer.instances(OURS)
    await buyer.close()
    assert set(offers) == zones
    assert len(zones) > 1
    assert ("/europe-west4-b/" in instance.provider_id, ended.provider_id) == (True, instance.provider_id)
    with pytest.raises(ConfigError, match=r"names no zone; write pool=zone/name, or set gcp\.region"):
        project.provider(OURS, groups=(f"*={SPOT}",))


async def test_a_valid_setup_has_no_findings(project: Project) -> None:
    """Credentials, groups with their offers, quotas, offers; read-only."""
    found = await examined(project)
    assert {one.level for one in found.values()} == {"ok"}
    assert {"credentials", "offers", "quota NVIDIA_L4_GPUS in europe-west4"} <= set(found)
    assert "g2-standard-4/europe-west4-a/spot to pool *" in found[f"gcp.groups {'/'.join(WHERE)}"].message
    assert project.fake.machines.launches_count == 0


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ("*=europe-west4-a/gke-cluster-pool-1234-grp", "GKE node pool"),
        ("*=europe-west4-a/nobody", "not found in europe-west4-a of project fake-project"),
        ("*=mars-north1-a/nobody", "no zone mars-north1-a of project fake-project"),
        ("*=nobody", "not found in any zone of europe-west4 of project fake-project"),
    ],
)
async def test_unknown_and_foreign_groups_are_reported(project: Project, group: str, problem: str) -> None:
    """With the setting that names them; there are no offers then."""
    found = await examined(project, groups=(group,), region="europe-west4")
    assert problem in found[f"gcp.groups {group.removeprefix('*=')}"].message
    assert found["offers"].level == "error"


async def test_a_wrong_project_is_reported_once(project: Project) -> None:
    """By the first call; the others would repeat it."""
    (only,) = (await examined(project, project="another")).values()
    assert (only.level, "projects/another" in only.message or "not allowed" in only.message) == ("error", True)


@pytest.mark.parametrize("call", ["instanceGroupManagers.list", "zoneOperations.list", "instances.aggregatedList"])
async def test_a_missing_permission_is_named_with_its_effect(project: Project, call: str) -> None:
    """The call, its permissions, and what does not work until then."""
    project.fake.faults.add(Fault(kind="refused", call=call, code="forbidden"))
    found = (await examined(project))[call]
    assert (found.level, CALLS[call].without in found.message) == ("error", True)
    assert CALLS[call].permissions[0] in found.next_step


@pytest.mark.cloud("gcp", calls=("projects.testIamPermissions",))
async def test_permissions_are_checked_without_using_them(project: Project) -> None:
    """Google reports granted permissions: missing ones are named with their effect, optional ones as warnings."""
    project.fake.missing_permissions = {"compute.instanceGroupManagers.update", "compute.advice.capacityHistory"}
    found = await examined(project)
    create, history = found["instanceGroupManagers.createInstances"], found["advice.capacityHistory"]
    assert (create.level, "nothing is launched" in create.message) == ("error", True)
    assert "allow compute.instanceGroupManagers.update; `gpu-autoscaler doctor --policy`" in create.next_step
    assert history.level == "warning"
    assert "permissions" not in found
    project.fake.faults.add(Fault(kind="refused", call="projects.testIamPermissions", code="accessNotConfigured"))
    untried = (await examined(project))["permissions"]
    assert (untried.level, "enable the Cloud Resource Manager API" in untried.next_step) == ("warning", True)
    assert project.fake.machines.launches_count == 0


@pytest.mark.cloud("gcp", errors=("clock skew",))
@pytest.mark.parametrize(("ahead_seconds", "words"), [(300.0, "s behind Google's"), (-300.0, "s ahead of Google's")])
async def test_a_wrong_clock_is_reported(project: Project, ahead_seconds: float, words: str) -> None:
    """Also if it is why the credentials are refused."""
    project.fake.clock_ahead_seconds = ahead_seconds
    assert words in (await examined(project))["clock"].message
    project.fake.faults.add(Fault(kind="refused", code="authError"))
    refused = await examined(project)
    assert list(refused) == ["instances.aggregatedList", "clock"]


@pytest.mark.cloud("gcp", calls=("projects.get",))
async def test_a_project_without_gpu_quota_is_reported(project: Project) -> None:
    """The global quota, zero in new projects: it rules out on-demand, not spot."""
    project.fake.quota_gpus["GPUS_ALL_REGIONS"] = 0
    buyer = project.provider(OURS)
    barred = {offer.key: offer.unavailable_because for offer in await buyer.offers()}
    await buyer.close()
    assert "GPUS_ALL_REGIONS of the project is 0" in str(barred["g2-standard-4/europe-west4-a/on-demand"])
    assert barred["g2-standard-4/europe-west4-a/spot"] is None
    told = (await examined(project))["quota GPUS_ALL_REGIONS of the project"]
    assert (told.level, "request an increase" in told.next_step) == ("warning", True)


async def test_an_unknown_quota_is_not_zero() -> None:
    """Of GPU families without a metric: offered, and reported as unknown."""
    async with served_project(("a3-highgpu-8g",)) as project:
        buyer = project.provider(OURS)
        offers = {offer.capacity_type: offer for offer in await buyer.offers()}
        await buyer.close()
        told = (await examined(project))["quota of nvidia-h100-80gb"]
    assert offers[CapacityType.ON_DEMAND].unavailable_because is None
    assert (told.level, "GPUs per GPU family" in told.next_step) == ("warning", True)


async def test_a_quota_of_zero_makes_offers_unavailable(project: Project) -> None:
    """The offer shows it, and `doctor` names the quota to request."""
    project.fake.quota_gpus["PREEMPTIBLE_NVIDIA_L4_GPUS"] = 0
    buyer = project.provider(OURS)
    barred = {offer.key: offer.unavailable_because for offer in await buyer.offers()}
    await buyer.close()
    assert barred["g2-standard-4/europe-west4-a/on-demand"] is None
    assert "PREEMPTIBLE_NVIDIA_L4_GPUS of europe-west4 is 0" in str(barred["g2-standard-4/europe-west4-a/spot"])
    told = (await examined(project))["quota PREEMPTIBLE_NVIDIA_L4_GPUS in europe-west4"]
    assert (told.level, SPOT in told.message, "request an increase" in told.next_step) == ("warning", True, True)


async def test_a_reservation_is_reported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose template targets a reservation uses nothing else."""
    from gpu_autoscaler.simcloud.gcp import fake, machines  # noqa: PLC0415 - needs googleapiclient

    affinity = {"consumeReservationType": "SPECIFIC_RESERVATION", "values": ["ours-2026"]}

    def reserved(name: str) -> dict[str, object] | None:
        properties = machines.template_properties(name)
        return None if properties is None else {**properties, "reservationAffinity": affinity}

    monkeypatch.setattr(fake, "template_properties", reserved)
    found = await examined(project, groups=("*=europe-west4-a/g2-standard-4-on-demand",))
    assert "from reservation ours-2026 only" in found["gcp.groups europe-west4-a/g2-standard-4-on-demand"].message


async def test_prices_and_risk_are_known_or_none(project: Project) -> None:
    """On-demand from the billing catalog, spot from the capacity history, else the catalog without risk; else none."""
    from gpu_autoscaler.simcloud.gcp import catalog  # noqa: PLC0415 - as above

    async def offered() -> dict[str, tuple[int | None, float | None]]:
        buyer = project.provider(OURS)
        found = {
            offer.key: (offer.price_micro_usd_per_hour, offer.interruption_ratio) for offer in await buyer.offers()
        }
        await buyer.close()
        return found

    kind, zone = catalog.KINDS["g2-standard-4"], "europe-west4-b"
    on_demand, spot = f"{kind.name}/{zone}/on-demand", f"{kind.name}/{zone}/spot"
    told = await offered()
    assert told[on_demand] == (catalog.on_demand_micro_usd(kind), None)
    price, risk = told[spot]
    assert (price, risk) == (catalog.spot_micro_usd(kind, zone), 0.04)
    project.fake.faults.add(Fault(kind="refused", call="advice.capacityHistory", code="forbidden"))
    told = await offered()
    assert told[spot] == (round(catalog.on_demand_micro_usd(kind) * catalog.SPOT_RATIO), None)
    project.fake.faults.add(Fault(kind="refused", call="services.skus.list", code="accessNotConfigured"))
    assert {price for price, _ in (await offered()).values()} == {None}
    assert (await examined(project))["prices"].level == "warning"


async def test_a_price_has_its_source_and_age(project: Project, tmp_path: Path) -> None:
    """The catalog's, the history's, or a file's, which has its modification date; `doctor` names the oldest."""
    zone, began, path = "europe-west4-a", project.clock.now(), tmp_path / "prices.json"
    path.write_text(json.dumps({f"g2-standard-4/{zone}/spot": 0.2}), encoding="utf-8")
    os.utime(path, (began.timestamp() - 86_400, began.timestamp() - 86_400))
    told = {}
    for prices_path in (None, str(path)):
        buyer = project.provider(OURS, prices_path=prices_path)
        offers = {
            offer.key.partition("/")[2]: offer
            for offer in await buyer.offers()
            if offer.key.startswith("g2-standard-4/")
        }
        await buyer.close()
        told[prices_path] = {key: (one.price_source, one.priced_at) for key, one in offers.items()}
    assert told[None][f"{zone}/on-demand"] == ("billing catalog", None)
    assert told[None][f"{zone}/spot"] == ("capacity history", None)
    assert told[str(path)][f"{zone}/on-demand"] == ("billing catalog", None)
    assert told[str(path)][f"{zone}/spot"] == ("price file", began - timedelta(days=1))
    finding = (await examined(project, prices_path=str(path)))["prices"]
    assert (finding.level, "gcp.prices_path" in finding.next_step) == ("warning", True)


async def test_without_permission_the_built_in_types_are_used(project: Project) -> None:
    """Sizes of the table; a type to which the template adds GPUs is asked for, and is a failure then."""
    project.fake.faults.add(Fault(kind="refused", call="machineTypes.get", code="forbidden"))
    buyer = project.provider(OURS, groups=("*=europe-west4-a/g2-standard-4-spot",))
    (offer,) = await buyer.offers()
    await buyer.close()
    assert (offer.gpu_model, offer.resources.gpu_count) == ("L4", 1)


@pytest.mark.cloud("gcp", calls=("regionInstanceTemplates.get",))
async def test_a_regional_template_is_read_from_its_region(project: Project) -> None:
    """A group may have one of its region."""
    project.fake.machines.groups[WHERE].described = {
        "instanceTemplate": f"https://x/projects/fake-project/regions/europe-west4/instanceTemplates/{SPOT}",
        "versions": [],
    }
    buyer = project.provider(OURS, groups=(f"*={'/'.join(WHERE)}",))
    (offer,) = await buyer.offers()
    await buyer.close()
    assert offer.key == "g2-standard-4/europe-west4-a/spot"
    assert len(project.fake.asked_of("regionInstanceTemplates.get")) == 1


async def test_doctor_checks_google_cloud(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor`, and the role that it prints: no more than the calls need."""
    for name, value in {
        "PROVIDER_NAME": "gcp",
        "PROVIDER_URL": project.url,
        "GCP_PROJECT": "fake-project",
        "GCP_GROUPS": f"*={'/'.join(WHERE)}",
    }.items():
        monkeypatch.setenv(f"GPU_AUTOSCALER_{name}", value)
    assert await asyncio.to_thread(run, ["doctor", "-o", "json"]) == 0
    assert {load["level"] for load in json.loads(capsys.readouterr().out)} == {"ok"}
    assert await asyncio.to_thread(run, ["doctor", "--policy"]) == 0
    role = json.loads(capsys.readouterr().out)
    assert role == json.loads(role_text())
    assert "compute.instanceGroupManagers.update" in role["includedPermissions"]


def test_every_call_matches_google_s_description() -> None:
    """Method, path and name of the table, against the discovery documents."""
    from gpu_autoscaler.simcloud.gcp.description import description  # noqa: PLC0415 - needs googleapiclient

    for name, allowed in CALLS.items():
        path = re.sub(r"\{\w+\}", "x", allowed.path)
        found = description().find(allowed.method, f"/{PREFIXES[allowed.api]}/{path}")
        assert found is not None, name
        assert found[0].name == name


async def test_google_s_own_client_drives_the_fake(project: Project) -> None:
    """Its requests are accepted, undescribed ones refused, and every answer has the described form."""
    from google.oauth2.credentials import Credentials  # noqa: PLC0415 - as above
    from googleapiclient.discovery import build  # noqa: PLC0415 - dev only, and slow to load
    from googleapiclient.errors import HttpError  # noqa: PLC0415 - as above

    from gpu_autoscaler.simcloud.gcp.description import description  # noqa: PLC0415 - as above

    def drive() -> list[tuple[str, object]]:
        api = build(
            "compute",
            "v1",
            credentials=Credentials(token="fake"),  # type: ignore[no-untyped-call]
            static_discovery=True,
            client_options={"api_endpoint": f"{project.url}/compute/v1/"},
        )
        place = {"project": "fake-project", "zone": "europe-west4-a"}
        group = {**place, "instanceGroupManager": SPOT}
        groups, operations = api.instanceGroupManagers(), api.zoneOperations()
        body = {"instances": [{"name": "by-hand", "preservedState": {"metadata": {"a": "b"}}}]}
        made = groups.createInstances(**group, body=body, requestId="0" * 8 + "-0000-4000-8000-" + "0" * 12).execute()
        with pytest.raises(HttpError, match="Unknown name"):
            groups.createInstances(**group, body={"instances": [{"nome": "x"}]}).execute()
        with pytest.raises(HttpError, match="was not found"):
            groups.createInstances(**place, instanceGroupManager="nobody", body=body).execute()
        rights = build(
            "cloudresourcemanager",
            "v3",
            credentials=Credentials(token="fake"),  # type: ignore[no-untyped-call]
            static_discovery=True,
            client_options={"api_endpoint": project.url},
        )
        asked = rights.projects().testIamPermissions(resource="projects/fake-project", body={"permissions": ["a.b"]})
        answers = [
            ("projects.testIamPermissions", asked.execute()),
            ("reservations.get", api.reservations().get(**place, reservation="ours-2026").execute()),
            ("projects.get", api.projects().get(project="fake-project").execute()),
            ("instanceGroupManagers.createInstances", made),
            ("instanceGroupManagers.list", groups.list(**place).execute()),
            ("instanceGroupManagers.listManagedInstances", groups.listManagedInstances(**group).execute()),
            ("instances.get", api.instances().get(**place, instance="by-hand").execute()),
            ("instances.aggregatedList", api.instances().aggregatedList(project="fake-project").execute()),
            ("zoneOperations.get", operations.get(**place, operation=made["name"]).execute()),
            ("zoneOperations.list", operations.list(**place).execute()),
            ("machineTypes.get", api.machineTypes().get(**place, machineType="g2-standard-4").execute()),
            ("regions.get", api.regions().get(project="fake-project", region="europe-west4").execute()),
        ]
        api.close()
        rights.close()
        return answers

    project.fake.reserve("ours-2026", "g2-standard-4", "europe-west4-a", 2)
    answers = await asyncio.to_thread(drive)
    for name, told in answers:
        assert description().answer_violations(description().named(name), told) == [], name
    assert len(project.fake.machines.machines) == 1
