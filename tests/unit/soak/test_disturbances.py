"""The schedule of the soak repeats with its seed, and spares nobody."""

from collections import Counter

from tests.soak.disturbances import BROKER, POSTGRES, schedule

SERVICES = ("cost-tracker", "gateway", "scaler")


def test_a_seed_repeats_its_schedule() -> None:
    """Another seed kills and submits at other times."""
    first, again, other = (schedule(seed, SERVICES, 300.0, pods_count=10_000) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_everything_is_killed_before_anything_is_killed_again() -> None:
    """Also the database and a broker, and all within the time."""
    events = schedule("a", SERVICES, 220.0, pods_count=10_000)
    kills = [event.name for event in events if event.kind == "kill"]
    victims = {*SERVICES, BROKER, POSTGRES}
    assert set(kills[:5]) == set(kills[5:10]) == victims
    assert all(0 < event.at_seconds < 220.0 for event in events)


def test_every_kind_of_disturbance_comes() -> None:
    """A storm has as many pods as the cluster allows for: 700 of 10,000."""
    events = schedule("a", SERVICES, 300.0, pods_count=10_000)
    assert Counter(event.kind for event in events).keys() == {"kill", "launch", "notices", "quota_storm"}
    assert {event.count for event in events if event.kind == "quota_storm"} == {700}
