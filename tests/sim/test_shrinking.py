"""A failing run gets small: what does not matter is left out."""

from gpu_autoscaler.sim.shrinking import shrink
from gpu_autoscaler.sim.world import Result, Setting

KINDS = ("broker_away", "launch_slow", "service_killed", "store_full")
HAPPENED = tuple((kind, number) for kind in KINDS for number in (1, 2, 3))


def imagined(setting: Setting) -> Result:
    """A run that breaks exactly when the second kill meets the third outage."""
    happened = [one for one in HAPPENED if setting.kinds is None or one[0] in setting.kinds]
    if setting.only is not None:
        happened = [one for one in happened if one in setting.only]
    is_broken = ("service_killed", 2) in happened and ("broker_away", 3) in happened
    return Result(
        seed=setting.seed,
        cluster_hours=1.0,
        facts_count=0,
        plans_count=0,
        nodes_mean=0.0,
        pods_count=0,
        digest="",
        faults=dict.fromkeys(sorted({kind for kind, _ in happened}), 3),
        happened=tuple(happened),
        reasons={},
        broken=("a promise: broken",) if is_broken else (),
        promise="a promise" if is_broken else "",
    )


def test_the_least_that_still_breaks_is_found() -> None:
    """Two occurrences of twelve are left, and running them again breaks the same promise."""
    setting = Setting(seed=1)
    smallest, result = shrink(setting, imagined(setting), imagined)
    assert result.promise == "a promise"
    assert set(smallest.only or ()) == {("service_killed", 2), ("broker_away", 3)}
    assert imagined(smallest).promise == "a promise"


def test_what_breaks_without_any_fault_needs_none() -> None:
    """A bug in plain sight is told without a list of innocents."""

    def always(setting: Setting) -> Result:
        broken = imagined(Setting(seed=1))
        return broken if setting.only is None else imagined(Setting(seed=1))

    smallest, _ = shrink(Setting(seed=1), imagined(Setting(seed=1)), always)
    assert smallest.only == ()
