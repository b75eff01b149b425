"""GPU models: the one table of what is known about each, from memory sizes and MIG profiles to the names in clouds.

A new model is one entry of GPU_TABLE; every other list of GPU models in the project is derived from it.

Sources: NVIDIA's data sheets, "CUDA GPU Compute Capability" (read 2026-11-22) and "Multi-Instance GPU User Guide",
"Supported MIG Profiles" (not looked up again); Azure documentation, "Naming conventions" and "Sizes for virtual
machines", "GPU accelerated" (read 2026-11-22); Compute Engine, "GPU machine types" (read 2026-11-21), and its API v1,
`Quota.metric` (discovery document of 2026-11-06).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

GIBIBYTE = 2**30


class MigProfile(msgspec.Struct, frozen=True, gc=False):
    """A MIG profile such as `1g.5gb`. A GPU has eight memory slices (A30: four); a profile has fixed placements."""

    name: str
    memory_slices_count: int
    starts: tuple[int, ...]  # memory slices at which it may start


class Accelerator(msgspec.Struct, frozen=True, gc=False):
    """A GPU as Google Cloud names it, with its quota metric. None: no metric, as Cloud Quotas counts by GPU family."""

    name: str
    quota_metric: str | None = None
    is_spot_only: bool = False  # the metric exists for spot alone


class GpuSize(msgspec.Struct, frozen=True, gc=False):
    """A model with one memory size."""

    memory_gib: int
    mig_profiles: tuple[MigProfile, ...] = ()  # empty: no MIG mode
    device_name: str | None = None  # name in NVIDIA's driver; None: `NVIDIA <model>`
    idle_watts: float = 30.0
    max_watts: float = 300.0
    azure_name_part: str | None = None  # in the names of sizes: Standard_NC24ads_A100_v4
    azure_families: tuple[str, ...] = ()  # families of older sizes, whose names do not contain the GPU; lower case
    gcp_accelerators: tuple[Accelerator, ...] = ()


class GpuModel(msgspec.Struct, frozen=True, gc=False):
    """A GPU model. Without architecture it is known to single clouds only, and not recognized in labels and claims."""

    name: str
    sizes: tuple[GpuSize, ...]
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one GPU; None if the model has several sizes."""
        return self.sizes[0].memory_gib * GIBIBYTE if len(self.sizes) == 1 else None


_ANY, _PAIRS, _PAIRS_OF_ONE, _HALVES, _FIRST = (0, 1, 2, 3, 4, 5, 6), (0, 2, 4), (0, 2, 4, 6), (0, 4), (0,)


def _mig(*names: str) -> tuple[MigProfile, ...]:
    """Return the profiles of a GPU with eight memory slices: 1g, 1g with double memory, 2g, 3g, 4g and 7g."""
    slices = ((1, _ANY), (2, _PAIRS_OF_ONE), (2, _PAIRS), (4, _HALVES), (4, _FIRST), (8, _FIRST))
    return tuple(MigProfile(name, count, starts) for name, (count, starts) in zip(names, slices, strict=True))


_MIG_80_GB = _mig("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")

GPU_TABLE = (
    GpuModel("A10", architecture="Ampere", compute_capability=(8, 6), sizes=(GpuSize(24, azure_name_part="A10"),)),
    GpuModel(
        "A100",
        architecture="Ampere",
        compute_capability=(8, 0),
        sizes=(
            GpuSize(
                40,
                mig_profiles=_mig("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
                device_name="NVIDIA A100-SXM4-40GB",
                idle_watts=52.0,
                max_watts=400.0,
                azure_families=("standardndasv4_a100family",),
                gcp_accelerators=(Accelerator("nvidia-tesla-a100", "NVIDIA_A100_GPUS"),),
            ),
            GpuSize(
                80,
                mig_profiles=_MIG_80_GB,
                device_name="NVIDIA A100-SXM4-80GB",
                idle_watts=60.0,
                max_watts=400.0,
                azure_name_part="A100",
                gcp_accelerators=(Accelerator("nvidia-a100-80gb", "NVIDIA_A100_80GB_GPUS"),),
            ),
        ),
    ),
    GpuModel(
        "A10G", architecture="Ampere", compute_capability=(8, 6), sizes=(GpuSize(24, idle_watts=20.0, max_watts=300.0),)
    ),
    GpuModel(
        "A30",
        sizes=(
            GpuSize(
                24,
                mig_profiles=(
                    MigProfile("1g.6gb", 1, (0, 1, 2, 3)),
                    MigProfile("2g.12gb", 2, (0, 2)),
                    MigProfile("4g.24gb", 4, (0,)),
                ),
            ),
        ),
    ),
    GpuModel(
        "B200",
        architecture="Blackwell",
        compute_capability=(10, 0),
        sizes=(
            GpuSize(
                180,
                mig_profiles=_mig("1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
                gcp_accelerators=(Accelerator("nvidia-b200"),),
            ),
        ),
    ),
    GpuModel("GB200", sizes=(GpuSize(186, azure_name_part="GB200"),)),
    GpuModel(
        "H100",
        architecture="Hopper",
        compute_capability=(9, 0),
        sizes=(
            GpuSize(
                80,
                mig_profiles=_MIG_80_GB,
                device_name="NVIDIA H100 80GB HBM3",
                idle_watts=70.0,
                max_watts=700.0,
                azure_name_part="H100",
                gcp_accelerators=(
                    Accelerator("nvidia-h100-80gb", "NVIDIA_H100_GPUS", is_spot_only=True),
                    Accelerator("nvidia-h100-mega-80gb"),
                ),
            ),
        ),
    ),
    GpuModel(
        "H200",
        architecture="Hopper",
        compute_capability=(9, 0),
        sizes=(
            GpuSize(
                141,
                mig_profiles=_mig("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
                idle_watts=75.0,
                max_watts=700.0,
                azure_name_part="H200",
                gcp_accelerators=(Accelerator("nvidia-h200-141gb"),),
            ),
        ),
    ),
    GpuModel(
        "L4",
        architecture="Ada Lovelace",
        compute_capability=(8, 9),
        sizes=(
            GpuSize(
                24, idle_watts=16.0, max_watts=72.0, gcp_accelerators=(Accelerator("nvidia-l4", "NVIDIA_L4_GPUS"),)
            ),
        ),
    ),
    GpuModel(
        "L40S",
        architecture="Ada Lovelace",
        compute_capability=(8, 9),
        sizes=(GpuSize(48, idle_watts=35.0, max_watts=350.0),),
    ),
    GpuModel("M60", sizes=(GpuSize(8, azure_families=("standardnvsv3family",)),)),
    GpuModel(
        "P100",
        architecture="Pascal",
        compute_capability=(6, 0),
        sizes=(
            GpuSize(
                16,
                azure_families=("standardncsv2family",),
                gcp_accelerators=(Accelerator("nvidia-tesla-p100", "NVIDIA_P100_GPUS"),),
            ),
        ),
    ),
    GpuModel("P4", sizes=(GpuSize(8, gcp_accelerators=(Accelerator("nvidia-tesla-p4", "NVIDIA_P4_GPUS"),)),)),
    GpuModel(
        "T4",
        architecture="Turing",
        compute_capability=(7, 5),
        sizes=(
            GpuSize(
                16,
                device_name="Tesla T4",
                idle_watts=9.0,
                max_watts=70.0,
                azure_name_part="T4",
                gcp_accelerators=(Accelerator("nvidia-tesla-t4", "NVIDIA_T4_GPUS"),),
            ),
        ),
    ),
    GpuModel(
        "V100",
        architecture="Volta",
        compute_capability=(7, 0),
        sizes=(
            GpuSize(
                16,
                device_name="Tesla V100-SXM2-16GB",
                idle_watts=40.0,
                max_watts=300.0,
                azure_families=("standardncsv3family",),
                gcp_accelerators=(Accelerator("nvidia-tesla-v100", "NVIDIA_V100_GPUS"),),
            ),
            GpuSize(32, azure_families=("standardndsv2family", "standardndv2family")),
        ),
    ),
)


def gpu_sizes(table: Iterable[GpuModel] = GPU_TABLE) -> Iterator[tuple[GpuModel, GpuSize]]:
    """Yield every model in each of its memory sizes."""
    return ((model, size) for model in table for size in model.sizes)


def recognized_models(table: Iterable[GpuModel] = GPU_TABLE) -> dict[str, GpuModel]:
    """Return the models that labels, policies and device claims may name, by name."""
    return {model.name: model for model in table if model.architecture is not None}


def mig_geometries(table: Iterable[GpuModel] = GPU_TABLE) -> dict[tuple[str, int], tuple[MigProfile, ...]]:
    """Return the MIG profiles by model and memory of the whole GPU in GiB; only of GPUs with MIG mode."""
    return {(model.name, size.memory_gib): size.mig_profiles for model, size in gpu_sizes(table) if size.mig_profiles}


GPU_MODELS: dict[str, GpuModel] = recognized_models()
MIG_GEOMETRIES: dict[tuple[str, int], tuple[MigProfile, ...]] = mig_geometries()
MIG_PROFILE_NAMES = frozenset(profile.name for profiles in MIG_GEOMETRIES.values() for profile in profiles)
_SHARED_GPU_WORDS = frozenset({"GRID", "MIG", "SHARED"})


def gpu_model_name(label: str) -> str | None:
    """Return the model named by a label such as `NVIDIA-A100-SXM4-40GB`, `a100` or `Tesla T4`; None if it names none.

    `NVIDIA-A100-SXM4-40GB-MIG-1g.5gb` and `Tesla-T4-SHARED` name none: such nodes count MIG slices (strategy `single`)
    or time-sliced replicas as GPUs (NVIDIA k8s-device-plugin, "GPU Feature Discovery", "Shared Access to GPUs"; read
    2026-11-21), and work that names the model needs a whole one. So does `GRID A100-8C`, a virtual GPU of 8 GB.

    Labels are those of NVIDIA's GPU feature discovery (`nvidia.com/gpu.product`), of Karpenter
    (`karpenter.k8s.aws/instance-gpu-name`) and of users (`gpu-type`).
    """
    words = label.upper().replace("_", "-").replace(" ", "-").split("-")
    if not _SHARED_GPU_WORDS.isdisjoint(words):
        return None
    return next((word for word in words if word in GPU_MODELS), None)


def mig_profiles_of(gpu_model: str | None, gpu_memory_bytes: int | None) -> tuple[MigProfile, ...]:
    """Return the MIG profiles of a GPU; empty if it has no MIG mode, or its memory is unknown."""
    if gpu_model is None or gpu_memory_bytes is None:
        return ()
    return MIG_GEOMETRIES.get((gpu_model, round(gpu_memory_bytes / GIBIBYTE)), ())


def can_partition(profiles: Sequence[MigProfile], names: Sequence[str]) -> bool:
    """Return whether one GPU with these profiles can hold all named slices at once; names may repeat."""
    known = {profile.name: profile for profile in profiles}
    if not names or any(name not in known for name in names):
        return False
    # The largest first, as they have the fewest placements.
    requested = sorted((known[name] for name in names), key=lambda p: (len(p.starts), -p.memory_slices_count))
    return _can_place(tuple(requested), 0)


def max_slices(profiles: Sequence[MigProfile], name: str) -> int:
    """Return how many slices of one profile a GPU holds; 0 if it does not have the profile."""
    return next((len(profile.starts) for profile in profiles if profile.name == name), 0)


@lru_cache(maxsize=1024)
def _can_place(requested: tuple[MigProfile, ...], taken: int) -> bool:
    """Return whether all fit beside the taken memory slices, a bit mask."""
    if not requested:
        return True
    mask = (1 << requested[0].memory_slices_count) - 1
    starts = (start for start in requested[0].starts if not (mask << start) & taken)
    return any(_can_place(requested[1:], taken | mask << start) for start in starts)
