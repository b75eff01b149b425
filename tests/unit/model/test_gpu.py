"""Sets of MIG slices that fit on one GPU, compared with NVIDIA's guide."""

import pytest

from gpu_autoscaler.kube.translate.products import gpu_products
from gpu_autoscaler.model.gpu import (
    GIBIBYTE,
    GPU_TABLE,
    MIG_GEOMETRIES,
    Accelerator,
    GpuModel,
    GpuSize,
    MigProfile,
    can_partition,
    max_slices,
    mig_geometries,
    mig_profiles_of,
    recognized_models,
)
from gpu_autoscaler.providers.azure.translate import gpus_by_family, gpus_by_name_part
from gpu_autoscaler.providers.gcp.translate import gpus_by_accelerator
from gpu_autoscaler.simcluster import exporter

A100 = mig_profiles_of("A100", 40 * GIBIBYTE)


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
def test_profile_sets_of_the_guide_fit(names: tuple[str, ...]) -> None:
    """Sets that NVIDIA's guide lists for the A100 with 40 GB."""
    assert can_partition(A100, names)


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
def test_overlapping_profile_sets_do_not_fit(names: tuple[str, ...]) -> None:
    """Enough memory in sum is not enough: slices start only at certain positions."""
    assert not can_partition(A100, names)


def test_every_geometry_fits_its_maximum_of_each_profile() -> None:
    """As many as `all-<profile>` fit, and one more does not."""
    for profiles in MIG_GEOMETRIES.values():
        for profile in profiles:
            most = max_slices(profiles, profile.name)
            assert can_partition(profiles, (profile.name,) * most), profile.name
            assert not can_partition(profiles, (profile.name,) * (most + 1)), profile.name


def test_a_gpu_of_unknown_memory_is_not_partitioned() -> None:
    """The A100 exists in two sizes, whose profiles differ."""
    assert mig_profiles_of("A100", None) == ()
    assert mig_profiles_of("T4", 16 * GIBIBYTE) == ()


def test_a_model_added_to_the_table_appears_in_each_derived_list() -> None:
    """Names, MIG profiles, device claims, cloud names and simulated telemetry follow from the one entry."""
    accelerator = Accelerator("nvidia-z9", "NVIDIA_Z9_GPUS")
    profile = MigProfile("1g.12gb", 1, (0,))
    size = GpuSize(
        memory_gib=96,
        mig_profiles=(profile,),
        device_name="NVIDIA Z9 96GB",
        idle_watts=50.0,
        max_watts=500.0,
        azure_name_part="Z9",
        azure_families=("standardndz9family",),
        gcp_accelerators=(accelerator,),
    )
    model = GpuModel(name="Z9", architecture="Noether", compute_capability=(11, 0), sizes=(size,))
    table = (*GPU_TABLE, model)
    assert recognized_models(table)["Z9"].memory_bytes == 96 * GIBIBYTE
    assert mig_geometries(table)["Z9", 96] == (profile,)
    assert (model, 96) in list(gpu_products(recognized_models(table).values()))
    assert gpus_by_name_part(table)["Z9"] == gpus_by_family(table)["standardndz9family"] == ("Z9", 96 * GIBIBYTE)
    assert gpus_by_accelerator(table)["nvidia-z9"] == (accelerator, 96)
    assert exporter.gpu_products(table)["Z9", 96] == ("NVIDIA Z9 96GB", 50.0, 500.0)


def test_table_entries_are_complete_and_unique() -> None:
    """Architecture and compute capability come together; no cloud name stands for two sizes."""
    assert all((model.architecture is None) == (model.compute_capability is None) for model in GPU_TABLE)
    sizes = [size for model in GPU_TABLE for size in model.sizes]
    names = [name for size in sizes for name in (*size.azure_families, *(one.name for one in size.gcp_accelerators))]
    names += [size.azure_name_part for size in sizes if size.azure_name_part is not None]
    assert len(names) == len(set(names))
    assert len({model.name for model in GPU_TABLE}) == len(GPU_TABLE)
