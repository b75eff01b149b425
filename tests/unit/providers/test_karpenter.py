"""What the Karpenter driver reads and writes, without a Karpenter: settings, file of offers, claims, refusals."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.karpenter import TYPES, options_in

from gpu_autoscaler.kube.wire.core import Condition, Metadata
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.aws.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.providers.karpenter.catalog import Shelf, offers_in, rows_of
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, NodeClass, validate_options
from gpu_autoscaler.providers.karpenter.translate import (
    HELD,
    OFFER,
    PRICE,
    claim_of,
    failure_of,
    instance_of,
    name_of,
    refused,
)
from gpu_autoscaler.providers.karpenter.wire import KARPENTER_FINALIZER, ClaimStatus, NodeClaim
from gpu_autoscaler.providers.protocol import Order

T0 = datetime(2026, 11, 22, tzinfo=UTC)
WORDS = (
    "AccessDenied",
    "AuthFailure",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientHostCapacity",
    "InsufficientInstanceCapacity",
    "MaxFleetCountExceeded",
    "MaxSpotInstanceCountExceeded",
    "ReservationCapacityExceeded",
    "UnauthorizedOperation",
    "UnfulfillableCapacity",
    "Unsupported",
    "VcpuLimitExceeded",
)
CLASS = NodeClass("karpenter.k8s.aws", "EC2NodeClass", "gpu")


def condition(name: str, status: str = "True", reason: str = "", message: str = "", at: datetime = T0) -> Condition:
    """One of a claim's conditions."""
    return msgspec.convert(
        {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": at}, Condition
    )


def claim(*conditions: Condition, deleted_at: datetime | None = None, is_held: bool = True) -> NodeClaim:
    """A claim of ours; `is_held`: by Karpenter, whose instance is not gone."""
    return NodeClaim(
        metadata=Metadata(
            name="c",
            uid="u",
            creation_timestamp=T0,
            deletion_timestamp=deleted_at,
            labels={"gpu-autoscaler.io/action-id": "a1"},
            annotations={OFFER: "gpu-1x/zone-a/spot", PRICE: "400000"},
            finalizers=(HELD, KARPENTER_FINALIZER) if is_held else (HELD,),
        ),
        status=ClaimStatus(provider_id="aws:///zone-a/i-1", conditions=conditions),
    )


def an_order(tmp_path: Path, **changes: Any) -> Order:  # noqa: ANN401 - fields of the struct
    """For the first offer of the file."""
    offer = offers_in(str(options_in(tmp_path).offers_path))[0]
    whole = Order(action_id=ActionId("a1"), installation="ours", pool="p", offer=offer, labels=(), taints=())
    return msgspec.structs.replace(whole, **changes)


# ---- settings


def test_every_missing_setting_is_told_at_once() -> None:
    """With what to set it to."""
    with pytest.raises(ConfigError) as wrong:
        validate_options(KarpenterOptions())
    assert [mistake.partition(":")[0] for mistake in wrong.value.mistakes] == [
        "karpenter.node_class",
        "karpenter.offers_path",
    ]
    with pytest.raises(ConfigError, match="'EC2NodeClass/gpu' is not group/Kind/name"):
        validate_options(KarpenterOptions(node_class="EC2NodeClass/gpu", offers_path="f"))


def test_limits_of_node_pools_are_refused_by_name() -> None:
    """A limit that is looked at after the fact keeps no promise; what to do instead is said."""
    with pytest.raises(ConfigError, match=r"karpenter\.node_pools: is needed with mode limits"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="limits"))
    with pytest.raises(ConfigError, match=r"karpenter\.node_pools: are of mode limits alone"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", node_pools=("gpu",)))
    validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="limits", node_pools=("gpu",)))
    with pytest.raises(ConfigError, match="'any' is none of claims, limits"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="any"))


# ---- the file of offers


def test_each_row_is_an_offer_a_zone_and_capacity_type(tmp_path: Path) -> None:
    """At its price; amounts as Kubernetes writes them; what pods get besides is filled in."""
    offers = {offer.key: offer for offer in offers_in(str(options_in(tmp_path).offers_path))}
    assert len(offers) == 5
    spot = offers["gpu-1x/zone-b/spot"]
    assert (spot.price_micro_usd_per_hour, spot.capacity_type) == (400_000, CapacityType.SPOT)
    assert (spot.resources.cpu_milli, spot.resources.gpu_count, spot.resources.pod_count) == (8000, 1, 110)
    assert (spot.gpu_model, spot.gpu_memory_bytes) == ("A10G", 24 * 2**30)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resources": {"cpu": "many", "memory": "1Gi"}}, "not a Kubernetes quantity: 'many'"),
        ({"resources": {"nvidia.com/gpu": "1"}}, "resources name no cpu or no memory"),
        ({"usd_per_hour": {"on-demand": 0}}, "> 0"),
        ({"usd_per_hour": {"cheap": 1}}, "cheap"),
        ({"zones": []}, "length >= 1"),
        ({"zones": ["zone-a", "zone-a"]}, "gpu-1x/zone-a/on-demand stands there twice"),
        ({"instance_type": "g5 xlarge"}, "matching regex"),
        ({"price": 1}, "price"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Nothing free, nothing twice, nothing that no label could say."""
    path = tmp_path / "offers.json"
    path.write_text(json.dumps([TYPES[0] | changes]))
    with pytest.raises(ConfigError) as wrong:
        offers_in(str(path))
    assert said in str(wrong.value)
    assert str(path) in str(wrong.value)


@pytest.mark.parametrize("text", ["[]", "{", "[1]"])
def test_a_file_without_offers_is_refused(tmp_path: Path, text: str) -> None:
    """As is one that is not there."""
    path = tmp_path / "offers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"offers\.json"):
        offers_in(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        offers_in(str(tmp_path / "elsewhere.json"))


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    """Prices move; what was read last is better than nothing."""
    path = Path(str(options_in(tmp_path).offers_path))
    shelf = Shelf(str(path))
    first = shelf.offers()
    for text, count in ((json.dumps(TYPES[:1]), 4), ("[", 4), (json.dumps(TYPES), 5)):
        path.write_text(text)
        os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)
        assert len(shelf.offers()) == count
    assert shelf.offers() == first


def test_what_another_driver_sells_comes_back_from_the_file_as_it_was(tmp_path: Path) -> None:
    """Sizes, GPUs and prices of the bundled table of AWS, written as rows and read again."""
    offers = [
        msgspec.structs.replace(
            offers_in(str(options_in(tmp_path).offers_path))[0],
            instance_type=kind.name,
            resources=kind.resources,
            gpu_model=kind.gpu_model,
            gpu_memory_bytes=kind.gpu_memory_bytes,
            capacity_type=capacity_type,
            price_micro_usd_per_hour=price,
        )
        for kind in KNOWN_INSTANCE_TYPES.values()
        if (kind.gpu_memory_bytes or 0) % 2**30 == 0
        for capacity_type, price in ((CapacityType.SPOT, None), (CapacityType.ON_DEMAND, 1_006_000))
    ]
    path = tmp_path / "shelf.json"
    path.write_bytes(msgspec.json.encode(rows_of(offers)))
    assert list(offers_in(str(path))) == sorted(offers, key=lambda offer: offer.key)


# ---- claims


def test_the_same_order_is_the_same_claim(tmp_path: Path) -> None:
    """And another's is another, also with the same action."""
    wanted = an_order(tmp_path)
    assert name_of(wanted) == name_of(an_order(tmp_path))
    assert len({name_of(wanted), name_of(an_order(tmp_path, installation="theirs"))}) == 2
    assert len(name_of(wanted)) <= 63
    assert claim_of(wanted, CLASS) == claim_of(wanted, CLASS)


def test_taints_that_vanish_are_not_waited_for_as_the_others(tmp_path: Path) -> None:
    """Karpenter keeps the two apart, and calls a node initialised only without the first."""
    stays, vanishes = (
        Taint("nvidia.com/gpu", "NoSchedule", "true"),
        Taint("ebs.csi.aws.com/agent-not-ready", "NoExecute"),
    )
    spec = claim_of(an_order(tmp_path, taints=(stays, vanishes)), CLASS)["spec"]
    assert spec["taints"] == [{"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"}]
    assert spec["startupTaints"] == [{"key": "ebs.csi.aws.com/agent-not-ready", "effect": "NoExecute"}]


def test_gpus_are_waited_for_unless_they_come_as_slices(tmp_path: Path) -> None:
    """Under other names they would be waited for in vain."""
    whole = claim_of(an_order(tmp_path), CLASS)["spec"]["resources"]["requests"]
    cut = claim_of(an_order(tmp_path, labels=(("nvidia.com/mig.config", "all-1g.5gb"),)), CLASS)
    assert whole == {"nvidia.com/gpu": "1"}
    assert cut["spec"]["resources"]["requests"] == {}


def test_labels_that_are_karpenters_are_left_to_it(tmp_path: Path) -> None:
    """It refuses them, or says them itself."""
    told = (("karpenter.sh/nodepool", "x"), ("kubernetes.io/hostname", "n"), ("team", "vision"))
    marks = claim_of(an_order(tmp_path, labels=told), CLASS)["metadata"]["labels"]
    assert marks["team"] == "vision"
    assert not {"karpenter.sh/nodepool", "kubernetes.io/hostname"} & marks.keys()


def test_conditions_are_the_life_of_an_instance() -> None:
    """Launched, registered, told to end, gone: the end is dated, and the price is the one that was agreed."""
    launched, registered = condition("Launched"), condition("Registered")
    ending = condition("InstanceTerminating", at=T0 + timedelta(minutes=5))
    told_at = T0 + timedelta(minutes=4)
    lives = [
        claim(launched),
        claim(launched, registered),
        claim(launched, registered, deleted_at=told_at),
        claim(launched, registered, ending, deleted_at=told_at, is_held=False),
    ]
    seen = [instance_of(live) for live in lives]
    assert [each.state for each in seen] == ["pending", "running", "terminating", "terminated"]
    assert [each.terminated_at for each in seen] == [None, None, None, T0 + timedelta(minutes=5)]
    assert {(each.instance_type, each.zone, each.capacity_type.value) for each in seen} == {
        ("gpu-1x", "zone-a", "spot")
    }
    assert {(each.price_micro_usd_per_hour, each.launched_at, each.action_id) for each in seen} == {(400_000, T0, "a1")}


# ---- refusals


@pytest.mark.cloud("karpenter", errors=WORDS)
@pytest.mark.parametrize("word", WORDS)
def test_a_clouds_word_is_found_in_karpenters_sentence(word: str) -> None:
    """Whichever of its sentences it stands in, it says how far the refusal reaches."""
    message = f"creating instance, with fleet error(s), {word}: we currently do not have it"
    found = refused("c", "LaunchFailed", message)
    assert (found.code, found.scope in ("offer", "zone", "region")) == (word, True)
    assert found.kind == refused("c", "InsufficientCapacityError", message).kind
    assert "NodeClaim c" in str(found)


def test_words_that_nobody_knows_are_for_people_to_see_to() -> None:
    """But for capacity, which Karpenter says by itself."""
    assert refused("c", "InsufficientCapacityError", "all requested types were unavailable").kind == "capacity"
    assert refused("c", "NodeClassNotReady", "no subnets").kind == "configuration"
    assert refused("c", "LaunchFailed", "instance type not found").kind == "configuration"


@pytest.mark.parametrize(
    ("status", "reason", "message", "is_failure"),
    [
        ("Unknown", "AwaitingReconciliation", "object is awaiting reconciliation", False),
        ("True", "Launched", "", False),
        ("Unknown", "LaunchFailed", "RequestLimitExceeded: too often", False),
        ("Unknown", "LaunchFailed", "context deadline exceeded", False),
        ("Unknown", "LaunchFailed", "instance type not found", True),
        ("Unknown", "Unauthorized", "User is not authorized", True),
    ],
)
def test_what_passes_by_itself_is_no_failure(status: str, reason: str, message: str, *, is_failure: bool) -> None:
    """Karpenter asks again; what it cannot mend is told."""
    said = failure_of(claim(condition("Launched", status, reason, message)))
    assert (said is not None) is is_failure
