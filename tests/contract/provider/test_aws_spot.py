"""AWS spot data: interruption bands and spot placement scores."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.contract.provider.contract import OURS, order
from tests.contract.provider.test_aws import AwsRig, rig_of

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, UnavailabilityCause
from gpu_autoscaler.providers.aws.advisor import bands_of
from gpu_autoscaler.providers.protocol import CapacityProvider, LaunchRefused
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)
ADVICE = {"spot_advisor": {"eu-west-1": {"Linux": {"g4dn.xlarge": {"r": 2, "s": 70}, "g5.xlarge": {"r": 4, "s": 60}}}}}
TYPES = ("g4dn.xlarge", "g5.xlarge", "g4dn.2xlarge")


rig = rig_of(AwsRig)


async def test_spot_risk_starts_with_the_published_band(rig: AwsRig, tmp_path: Path) -> None:
    """Its upper edge, for spot only, and while the file is recent; doctor reports its date."""
    path = tmp_path / "advice.json"
    path.write_bytes(msgspec.json.encode(ADVICE))
    written_at = rig.now() - timedelta(days=59)
    os.utime(path, (written_at.timestamp(), written_at.timestamp()))
    provider = rig.region.provider(OURS, spot_advisor_path=str(path))
    young = {offer.key: offer.interruption_ratio for offer in await provider.offers()}
    said = {one.subject: one for one in await provider.preflight()}["aws.spot_advisor_path"]
    await rig.wait(2 * 86_400)
    old = {offer.key: offer.interruption_ratio for offer in await provider.offers()}
    late = {one.subject: one for one in await provider.preflight()}["aws.spot_advisor_path"]
    await provider.close()
    assert young["g4dn.xlarge/eu-west-1a/spot"] == 0.15
    assert young["g5.xlarge/eu-west-1c/spot"] == 0.30
    assert young["g4dn.xlarge/eu-west-1a/on-demand"] is None
    assert set(old.values()) == {None}
    assert (said.level, f"{written_at:%Y-%m-%d}" in said.message) == ("ok", True)
    assert late.level == "warning"


def test_a_file_with_a_date_has_that_date(tmp_path: Path) -> None:
    """A mounted file is as old as its pod, and would never become outdated."""
    path = tmp_path / "advice.json"
    path.write_bytes(msgspec.json.encode(ADVICE | {"read_on": "2026-09-01"}))
    bands = bands_of(str(path), "eu-west-1")
    assert bands.dated_at == datetime(2026, 9, 1, tzinfo=UTC)
    assert bands.ratio("g5.xlarge", datetime(2026, 10, 31, tzinfo=UTC)) == 0.30
    assert bands.ratio("g5.xlarge", datetime(2026, 11, 1, tzinfo=UTC)) is None


def test_an_invalid_advisor_file_is_refused(tmp_path: Path) -> None:
    """Another format, or other regions only."""
    path = tmp_path / "advice.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"advice\.json: is not Spot Instance advisor data"):
        bands_of(str(path), "eu-west-1")
    path.write_bytes(msgspec.json.encode(ADVICE))
    with pytest.raises(ConfigError, match="has no data for us-east-1"):
        bands_of(str(path), "us-east-1")


@pytest.mark.cloud("aws", errors=("SpotMaxPriceTooLow",))
async def test_spot_prices_are_limited_by_ceilings(rig: AwsRig) -> None:
    """The ceiling is sent with the launch; offers above it are unavailable, and AWS refuses an order after a price
    rise. The lowest match applies."""
    ceilings = ("g4dn.*=0.30", "g4dn.xlarge=0.200009", "g5.*=0.01")
    provider = rig.region.provider(OURS, spot_ceilings=ceilings, instance_types=TYPES)
    offers = {offer.key: offer for offer in await provider.offers()}
    cheap = offers["g4dn.xlarge/eu-west-1a/spot"]
    assert (cheap.price_micro_usd_per_hour or 0) < 200_000
    wanted = msgspec.structs.replace(await order(rig), offer=cheap)
    made = await provider.launch(wanted)
    found = {one.subject: one for one in await provider.preflight()}

    rig.fake.spot_ratio_of = lambda _: 2.0
    with pytest.raises(LaunchRefused) as refused:
        await provider.launch(msgspec.structs.replace(wanted, action_id=ActionId("a2")))
    dear = {offer.key: offer for offer in await provider.offers()}[cheap.key]
    await provider.close()
    asked = rig.fake.asked_of("RunInstances")[0].parameters
    assert asked["InstanceMarketOptions.SpotOptions.MaxPrice"] == "0.20000"
    assert made.capacity_type is CapacityType.SPOT
    assert (cheap.unavailable_by, offers["g4dn.2xlarge/eu-west-1a/spot"].unavailable_by) == (None, None)
    assert offers["g5.xlarge/eu-west-1a/spot"].unavailable_by is UnavailabilityCause.CEILING
    assert offers["g5.xlarge/eu-west-1a/on-demand"].unavailable_by is None
    assert (dear.unavailable_by, "exceeds the ceiling of $0.20000" in str(dear.unavailable_because)) == (
        UnavailabilityCause.CEILING,
        True,
    )
    assert (refused.value.kind, refused.value.code) == ("capacity", "SpotMaxPriceTooLow")
    assert found["aws.spot_ceilings g4dn.xlarge"].level == "ok"
    assert "excludes 3 of 3" in found["aws.spot_ceilings g5.*"].message


async def waits(rig: AwsRig, provider: CapacityProvider) -> dict[str, float]:
    """Return the back-off by zone and purchase option."""
    found = {}
    for number, offer in enumerate(await provider.offers()):
        if offer.instance_type == "g4dn.xlarge":
            with pytest.raises(LaunchRefused) as refused:
                await provider.launch(msgspec.structs.replace(await order(rig, f"a{number}"), offer=offer))
            found[f"{offer.zone}/{offer.capacity_type}"] = refused.value.retry_after_seconds
    return found


@pytest.mark.cloud("aws", calls=("GetSpotPlacementScores",), errors=("scores unreadable",))
async def test_a_low_placement_score_extends_the_back_off(rig: AwsRig) -> None:
    """Up to four times; spot only; requested once an hour, and only if configured."""
    subnets = rig.fake.machines.backend.get_default_subnets()
    zone_ids = [subnets[f"eu-west-1{zone}"]._availability_zone.zone_id for zone in "ab"]
    rig.fake.scores = {zone_ids[0]: 10, zone_ids[1]: 1}
    await rig.refuse("*")
    provider = rig.region.provider(OURS, instance_types=TYPES, placement_score_count=10)
    weighed = await waits(rig, provider)
    asked = rig.fake.asked_of("GetSpotPlacementScores")
    plain = await waits(rig, rig.ours)
    rig.fake.faults.add(Fault(kind="refused", call="GetSpotPlacementScores", code="UnauthorizedOperation"))
    await rig.wait(3600)
    denied = await waits(rig, provider)
    await provider.close()
    assert {zone: weighed[f"eu-west-1{zone}/{CapacityType.SPOT}"] for zone in "abc"} == {"a": 180, "b": 720, "c": 180}
    assert weighed[f"eu-west-1b/{CapacityType.ON_DEMAND}"] == 180
    assert set(plain.values()) == {180.0}
    assert len(asked) == 1
    assert asked[0].listed("InstanceType") == sorted(TYPES)
    assert denied == weighed
