"""Which sets of slices one GPU holds: NVIDIA's geometry, held to what its guide lists."""

import pytest

from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.mig import GEOMETRIES, can_be_cut, geometry, most_of

A100 = geometry("A100", 40 * GIBIBYTE)


@pytest.mark.parametrize(
    "names",
    [
        ("1g.5gb",) * 7,
        ("7g.40gb",),
        ("3g.20gb", "3g.20gb"),
        ("4g.20gb", "3g.20gb"),
        ("4g.20gb", "2g.10gb", "1g.5gb"),
        ("3g.20gb", "2g.10gb", "1g.5gb"),
        ("2g.10gb", "2g.10gb", "2g.10gb", "1g.5gb"),
        ("1g.10gb",) * 4,
    ],
)
def test_sets_of_the_guide_fit(names: tuple[str, ...]) -> None:
    """Sets that NVIDIA's guide lists for the A100 with 40 GB."""
    assert can_be_cut(A100, names)


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("1g.5gb",) * 8,
        ("3g.20gb", "3g.20gb", "1g.5gb"),
        ("4g.20gb", "4g.20gb"),
        ("7g.40gb", "1g.5gb"),
        ("2g.10gb",) * 4,
        ("1g.10gb",) * 5,
        ("1g.18gb",),
    ],
)
def test_sets_that_overlap_do_not_fit(names: tuple[str, ...]) -> None:
    """Enough memory in sum is not enough: slices begin only at certain places."""
    assert not can_be_cut(A100, names)


def test_every_geometry_holds_as_many_of_each_profile_as_it_says() -> None:
    """What `all-<profile>` means fits, and one more does not."""
    for profiles in GEOMETRIES.values():
        for profile in profiles:
            most = most_of(profiles, profile.name)
            assert can_be_cut(profiles, (profile.name,) * most), profile.name
            assert not can_be_cut(profiles, (profile.name,) * (most + 1)), profile.name


def test_a_gpu_of_unknown_memory_is_not_cut() -> None:
    """The A100 was sold in two sizes, whose profiles differ."""
    assert geometry("A100", None) == ()
    assert geometry("T4", 16 * GIBIBYTE) == ()
