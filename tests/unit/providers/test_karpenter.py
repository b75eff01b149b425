"""The Karpenter driver's documents: settings, offers file, claims and refusals, without a server."""

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
from gpu_autoscaler.providers.karpenter.catalog import Catalog, offers_in, rows_of
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions, NodeClass, validate_options
from gpu_autoscaler.providers.karpenter.translate import (
    FINALIZER,
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
            finalizers=(FINALIZER, KARPENTER_FINALIZER) if is_held else (FINALIZER,),
        ),
        status=ClaimStatus(provider_id="aws:///zone-a/i-1", conditions=conditions),
    )


def an_order(tmp_path: Path, **changes: Any) -> Order:  # noqa: ANN401 - fields of the struct
    """For the first offer of the file."""
    offer = offers_in(str(options_in(tmp_path).offers_path))[0]
    whole = Order(action_id=ActionId("a1"), installation="ours", pool="p", offer=offer, labels=(), taints=())
    return msgspec.structs.replace(whole, **changes)


# ---- settings


def test_all_missing_settings_are_reported_together() -> None:
    """Each with an example value."""
    with pytest.raises(ConfigError) as wrong:
        validate_options(KarpenterOptions())
    assert [mistake.partition(":")[0] for mistake in wrong.value.violations] == [
        "karpenter.node_class",
        "karpenter.offers_path",
    ]
    with pytest.raises(ConfigError, match="'EC2NodeClass/gpu' is not group/Kind/name"):
        validate_options(KarpenterOptions(node_class="EC2NodeClass/gpu", offers_path="f"))


def test_node_pool_limits_are_refused_in_claims_mode() -> None:
    """Claims do not respect them; the error has the alternative."""
    with pytest.raises(ConfigError, match=r"karpenter\.node_pools: is required with mode limits"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="limits"))
    with pytest.raises(ConfigError, match=r"karpenter\.node_pools: requires mode limits"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", node_pools=("gpu",)))
    validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="limits", node_pools=("gpu",)))
    with pytest.raises(ConfigError, match="'any' is not one of claims, limits"):
        validate_options(KarpenterOptions(node_class="a/b/c", offers_path="f", mode="any"))


# ---- the file of offers


def test_each_row_has_an_offer_per_zone_and_capacity_type(tmp_path: Path) -> None:
    """With its price; Kubernetes quantities are accepted, and missing pod limits get a default."""
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
        ({"resources": {"nvidia.com/gpu": "1"}}, "resources lack cpu or memory"),
        ({"usd_per_hour": {"on-demand": 0}}, "> 0"),
        ({"usd_per_hour": {"cheap": 1}}, "cheap"),
        ({"zones": []}, "length >= 1"),
        ({"zones": ["zone-a", "zone-a"]}, "gpu-1x/zone-a/on-demand occurs twice"),
        ({"instance_type": "g5 xlarge"}, "matching regex"),
        ({"price": 1}, "price"),
    ],
)
def test_file_errors_name_their_position(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Zero prices, duplicates, values that are not valid label values."""
    path = tmp_path / "offers.json"
    path.write_text(json.dumps([TYPES[0] | changes]))
    with pytest.raises(ConfigError) as wrong:
        offers_in(str(path))
    assert said in str(wrong.value)
    assert str(path) in str(wrong.value)


@pytest.mark.parametrize("text", ["[]", "{", "[1]"])
def test_a_file_without_offers_is_refused(tmp_path: Path, text: str) -> None:
    """So is a missing file."""
    path = tmp_path / "offers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"offers\.json"):
        offers_in(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        offers_in(str(tmp_path / "elsewhere.json"))


def test_a_changed_file_is_reloaded_unless_invalid(tmp_path: Path) -> None:
    """If it is invalid, the last valid offers stay in use."""
    path = Path(str(options_in(tmp_path).offers_path))
    catalog = Catalog(str(path))
    first = catalog.offers()
    for text, count in ((json.dumps(TYPES[:1]), 4), ("[", 4), (json.dumps(TYPES), 5)):
        path.write_text(text)
        os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)
        assert len(catalog.offers()) == count
    assert catalog.offers() == first


def test_offers_of_another_driver_survive_the_file(tmp_path: Path) -> None:
    """Sizes, GPUs and prices of the bundled AWS table, written as rows and read back."""
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


def test_the_same_order_has_the_same_claim_name(tmp_path: Path) -> None:
    """Another order has another name, also for the same action."""
    wanted = an_order(tmp_path)
    assert name_of(wanted) == name_of(an_order(tmp_path))
    assert len({name_of(wanted), name_of(an_order(tmp_path, installation="theirs"))}) == 2
    assert len(name_of(wanted)) <= 63
    assert claim_of(wanted, CLASS) == claim_of(wanted, CLASS)


def test_startup_taints_are_separate_from_taints(tmp_path: Path) -> None:
    """Karpenter reports a node initialized only when its startup taints are gone."""
    stays, vanishes = (
        Taint("nvidia.com/gpu", "NoSchedule", "true"),
        Taint("ebs.csi.aws.com/agent-not-ready", "NoExecute"),
    )
    spec = claim_of(an_order(tmp_path, taints=(stays, vanishes)), CLASS)["spec"]
    assert spec["taints"] == [{"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"}]
    assert spec["startupTaints"] == [{"key": "ebs.csi.aws.com/agent-not-ready", "effect": "NoExecute"}]


def test_gpus_are_requested_unless_partitioned(tmp_path: Path) -> None:
    """MIG slices have other resource names; Karpenter would wait forever."""
    whole = claim_of(an_order(tmp_path), CLASS)["spec"]["resources"]["requests"]
    cut = claim_of(an_order(tmp_path, labels=(("nvidia.com/mig.config", "all-1g.5gb"),)), CLASS)
    assert whole == {"nvidia.com/gpu": "1"}
    assert cut["spec"]["resources"]["requests"] == {}


def test_karpenter_s_own_labels_are_omitted(tmp_path: Path) -> None:
    """It refuses them or sets them itself."""
    told = (("karpenter.sh/nodepool", "x"), ("kubernetes.io/hostname", "n"), ("team", "vision"))
    marks = claim_of(an_order(tmp_path, labels=told), CLASS)["metadata"]["labels"]
    assert marks["team"] == "vision"
    assert not {"karpenter.sh/nodepool", "kubernetes.io/hostname"} & marks.keys()


def test_conditions_become_instance_states() -> None:
    """Launched, registered, terminating, ended: with the time of the end and the agreed price."""
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
def test_a_cloud_code_is_found_in_karpenter_s_message(word: str) -> None:
    """Anywhere in the message; it decides the refusal's scope."""
    message = f"creating instance, with fleet error(s), {word}: we currently do not have it"
    found = refused("c", "LaunchFailed", message)
    assert (found.code, found.scope in ("offer", "zone", "region")) == (word, True)
    assert found.kind == refused("c", "InsufficientCapacityError", message).kind
    assert "NodeClaim c" in str(found)


def test_unknown_codes_are_configuration_problems() -> None:
    """Except insufficient capacity, which Karpenter reports itself."""
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
def test_errors_retried_by_karpenter_are_not_refusals(
    status: str, reason: str, message: str, *, is_failure: bool
) -> None:
    """What a retry cannot fix is reported."""
    said = failure_of(claim(condition("Launched", status, reason, message)))
    assert (said is not None) is is_failure
