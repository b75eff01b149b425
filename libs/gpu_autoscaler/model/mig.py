"""How one GPU can be cut into slices (MIG): which sets of profiles fit together, by NVIDIA's placement rules.

A GPU has eight slices of memory and seven of compute. A profile begins only at certain memory slices: those of one
slice at 0 to 6, of two at 0, 2 and 4 (a single compute slice with twice its memory also at 6), those of four at 0 and
4, that of four compute slices only at 0. The A30 has four of each. Source: NVIDIA, "Multi-Instance GPU User Guide",
"Supported MIG Profiles" and `nvidia-smi mig -lgipp`, from memory of the guide, not looked up again.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from gpu_autoscaler.model.gpu import GIBIBYTE


class Profile(msgspec.Struct, frozen=True, gc=False):
    """One way to cut a slice: `1g.5gb`."""

    name: str
    memory_slices_count: int
    starts: tuple[int, ...]  # the memory slices at which it may begin

    @property
    def memory_gb(self) -> int:
        """What its name says, which its pods can count on: the name is rounded."""
        return int(self.name.partition(".")[2].removesuffix("gb"))


_ONE, _TWO, _TWO_OF_ONE, _FOUR, _FIRST = (0, 1, 2, 3, 4, 5, 6), (0, 2, 4), (0, 2, 4, 6), (0, 4), (0,)


def _eighths(*names: str) -> tuple[Profile, ...]:
    one, double, two, three, four, seven = names
    return (
        Profile(one, 1, _ONE),
        Profile(double, 2, _TWO_OF_ONE),
        Profile(two, 2, _TWO),
        Profile(three, 4, _FOUR),
        Profile(four, 4, _FIRST),
        Profile(seven, 8, _FIRST),
    )


# By model and memory of the whole GPU in GiB; a model that is not here has no MIG mode.
GEOMETRIES: dict[tuple[str, int], tuple[Profile, ...]] = {
    ("A30", 24): (Profile("1g.6gb", 1, (0, 1, 2, 3)), Profile("2g.12gb", 2, (0, 2)), Profile("4g.24gb", 4, (0,))),
    ("A100", 40): _eighths("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    ("A100", 80): _eighths("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    ("H100", 80): _eighths("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    ("H200", 141): _eighths("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    ("B200", 180): _eighths("1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
}
PROFILE_NAMES = frozenset(profile.name for profiles in GEOMETRIES.values() for profile in profiles)


def geometry(gpu_model: str | None, gpu_memory_bytes: int | None) -> tuple[Profile, ...]:
    """Return the profiles of a GPU; none where it has no MIG mode, or its memory is not known."""
    if gpu_model is None or gpu_memory_bytes is None:
        return ()
    return GEOMETRIES.get((gpu_model, round(gpu_memory_bytes / GIBIBYTE)), ())


def can_be_cut(profiles: Sequence[Profile], names: Sequence[str]) -> bool:
    """True when one GPU of this geometry holds all these slices at once; a name may stand there several times."""
    known = {profile.name: profile for profile in profiles}
    if not names or any(name not in known for name in names):
        return False
    # The largest first, as they have the fewest places to begin at.
    wanted = sorted((known[name] for name in names), key=lambda each: (len(each.starts), -each.memory_slices_count))
    return _fits(tuple(wanted), 0)


def most_of(profiles: Sequence[Profile], name: str) -> int:
    """How many slices of one profile a GPU of this geometry holds; none of a profile that it does not have."""
    return next((len(profile.starts) for profile in profiles if profile.name == name), 0)


@lru_cache(maxsize=1024)
def _fits(wanted: tuple[Profile, ...], taken: int) -> bool:
    """True when all are placed beside the memory slices that are taken, which are bits."""
    return not wanted or any(_fits(wanted[1:], taken | mask) for mask in _masks(wanted[0]) if not mask & taken)


def _masks(profile: Profile) -> Iterator[int]:
    for start in profile.starts:
        yield ((1 << profile.memory_slices_count) - 1) << start
