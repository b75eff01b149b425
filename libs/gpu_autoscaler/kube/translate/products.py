"""The available GPU products as NVIDIA's driver will describe them, to evaluate device claims before a purchase.

A condition that holds for every memory size of a model selects the model; one that holds for some sizes also sets the
minimum memory, if a lower bound expresses it. An attribute that is unknown before the machine exists never justifies a
purchase. Sources: NVIDIA, "DRA Driver for GPUs", attributes of a ResourceSlice; its data sheets and "CUDA GPU Compute
Capability" (read 2026-11-22).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpu_autoscaler.model.cel import Condition
from gpu_autoscaler.model.cel_values import Amount, Device, PartialString, Version
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, GpuModel, gpu_model_name, gpu_sizes

GPU_DRIVER = "gpu.nvidia.com"
# Drivers report less memory than the nominal size: 81559Mi of 80 GB (H100), 15360Mi of 16 (T4), 46068Mi of 48 (L40S).
_REAL_RATIO_MIN = 0.9
_SIZE = re.compile(r"(\d+) ?GB", re.IGNORECASE)
_PROFILE = re.compile(r"[1-7]g\.\d+gb(?:\+\w+)*")  # such as 1g.5gb: NVIDIA, "MIG User Guide", profile names


class Fit(NamedTuple):
    """The devices that satisfy a claim."""

    models: frozenset[str] | None = None  # any of these; None: any model
    memory_bytes_min: int | None = None  # of one GPU, when only some sizes of a model fit
    profile: str = ""  # MIG profile, such as 1g.5gb; empty: a whole GPU


class _Product(NamedTuple):
    """A model with one memory size."""

    model: GpuModel
    size_gib: int


class _ProductName(PartialString):
    """A product name such as `NVIDIA H100 80GB HBM3`, of which only model and size are known."""

    def __init__(self, product: _Product) -> None:
        self._product = product

    def is_word(self, word: str) -> bool | None:
        """Compare model and size; None when the name lacks the size of a model with several."""
        if gpu_model_name(word) != self._product.model.name:
            return False
        if len(self._product.model.sizes) == 1:
            return True
        size = _SIZE.search(word)
        return None if size is None else int(size[1]) == self._product.size_gib

    def has_part(self, part: str) -> bool | None:
        """True for the model's own name, False for another model's."""
        model = gpu_model_name(part)
        if model is not None and model != self._product.model.name:
            return False
        return True if part == self._product.model.name else None


def fit_of(conditions: Sequence[Condition]) -> Fit | str:
    """Return the devices for which all conditions certainly hold; otherwise why that is unknown."""
    if _holds(conditions, _device("gpu")):
        return Fit()
    if whole_gpu_fit := _fitting_models(conditions, "gpu", ""):
        return whole_gpu_fit
    named = {word for condition in conditions for word in condition.words if _PROFILE.fullmatch(word)}
    profiles = [
        Fit(profile=profile)
        if _holds(conditions, _device("mig", profile))
        else _fitting_models(conditions, "mig", profile)
        for profile in sorted(named)
    ]
    found_profiles = [profile for profile in profiles if profile]
    if len(found_profiles) == 1 and not isinstance(found_profiles[0], str):
        return found_profiles[0]
    problem = next((fit for fit in (whole_gpu_fit, *profiles) if isinstance(fit, str) and fit), "")
    return problem or "the matching GPUs are unknown before the machine exists"


def is_about_gpus(conditions: Sequence[Condition]) -> bool:
    """True when devices of the GPU driver may satisfy the conditions, and those of other drivers cannot."""
    other = Device(driver="other.example.com", attributes={}, capacity={}, is_all=True)
    ours = Device(driver=GPU_DRIVER, attributes={}, capacity={}, is_all=False)
    return any(condition.judge(other) is False for condition in conditions) and not any(
        condition.judge(ours) is False for condition in conditions
    )


def _fitting_models(conditions: Sequence[Condition], kind: str, profile: str) -> Fit | str:
    """Return the models that fit; the problem when their sizes cannot be distinguished; empty when none fits."""
    fits, fails = set[_Product](), set[_Product]()
    for product in gpu_products():
        is_fit = _holds(conditions, _device(kind, profile, product))
        (fits if is_fit else fails).add(product)
    models = frozenset(product.model.name for product in fits)
    mixed = [product for product in fails if product.model.name in models]
    if not mixed:
        return Fit(models=models, profile=profile) if models else ""
    least = int(min(product.size_gib for product in fits) * _REAL_RATIO_MIN * GIBIBYTE)
    if profile or any(product.size_gib * GIBIBYTE >= least for product in mixed):
        names = " and ".join(sorted({product.model.name for product in mixed}))
        return f"{names} has memory sizes that the claim does not distinguish"
    return Fit(models=models, memory_bytes_min=least)


def gpu_products(models: Iterable[GpuModel] = tuple(GPU_MODELS.values())) -> Iterator[_Product]:
    """Yield each recognized model in each of its sizes."""
    return (_Product(model, size.memory_gib) for model, size in gpu_sizes(models))


def _device(kind: str, profile: str = "", product: _Product | None = None) -> Device:
    """Return a GPU, or a slice of one, with its known attributes."""
    attributes: dict[str, object] = {"type": kind}
    if profile:
        attributes["profile"] = profile
    capacity: dict[str, object] = {}
    if product is not None:
        attributes |= {
            "productName": _ProductName(product),
            "architecture": product.model.architecture,
            "cudaComputeCapability": Version(*(product.model.compute_capability or (0, 0)), 0),
        }
        if kind == "gpu":
            most_milli = product.size_gib * GIBIBYTE * 1000
            capacity = {"memory": Amount(int(most_milli * _REAL_RATIO_MIN), most_milli)}
    return Device(driver=GPU_DRIVER, attributes={GPU_DRIVER: attributes}, capacity={GPU_DRIVER: capacity}, is_all=False)


def _holds(conditions: Sequence[Condition], device: Device) -> bool:
    return all(condition.judge(device) is True for condition in conditions)
