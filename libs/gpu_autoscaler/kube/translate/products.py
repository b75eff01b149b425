"""The GPUs that can be bought, as NVIDIA's driver will describe them once they are there: what claims are judged by.

A condition that holds for every size that a model is sold in names the model; one that tells the sizes apart names the
least memory as well, where a lower bound says it. Whatever cannot be known before the machine is there is no reason to
buy it. Sources: NVIDIA, "DRA Driver for GPUs", attributes of a ResourceSlice; its data sheets and "CUDA GPU Compute
Capability" (read 2026-11-22).
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_autoscaler.model.cel import Condition
from gpu_autoscaler.model.cel_values import Amount, Device, VagueWord, Version
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS, gpu_model_name

GPU_DRIVER = "gpu.nvidia.com"
# What a driver counts is less than what is sold: 81559Mi of 80 GB (H100), 15360Mi of 16 (T4), 46068Mi of 48 (L40S).
_REAL_RATIO_MIN = 0.9
# Of models whose name does not say the memory: every size that they are sold in.
_SIZES_GIB = {"A100": (40, 80), "V100": (16, 32)}
_KINDS = {
    "A10": ("Ampere", Version(8, 6, 0)),
    "A100": ("Ampere", Version(8, 0, 0)),
    "A10G": ("Ampere", Version(8, 6, 0)),
    "B200": ("Blackwell", Version(10, 0, 0)),
    "H100": ("Hopper", Version(9, 0, 0)),
    "H200": ("Hopper", Version(9, 0, 0)),
    "L4": ("Ada Lovelace", Version(8, 9, 0)),
    "L40S": ("Ada Lovelace", Version(8, 9, 0)),
    "P100": ("Pascal", Version(6, 0, 0)),
    "T4": ("Turing", Version(7, 5, 0)),
    "V100": ("Volta", Version(7, 0, 0)),
}
_SIZE = re.compile(r"(\d+) ?GB", re.IGNORECASE)
_PROFILE = re.compile(r"[1-7]g\.\d+gb(?:\+\w+)*")  # as 1g.5gb: NVIDIA, "MIG User Guide", profile names


class Fit(NamedTuple):
    """What a claim is for."""

    models: frozenset[str] | None = None  # any of these; None: whatever model
    memory_bytes_min: int | None = None  # of one GPU, where sizes of a model have to be told apart
    profile: str = ""  # part of a GPU, as 1g.5gb; empty: all of it


class _Product(NamedTuple):
    """A model in one size."""

    model: str
    size_gib: int


class _ProductName(VagueWord):
    """`NVIDIA H100 80GB HBM3`, of which model and size are known."""

    def __init__(self, product: _Product) -> None:
        self._product = product

    def is_word(self, word: str) -> bool | None:
        """By model and size; a name without a size does not tell the sizes of a model apart."""
        if gpu_model_name(word) != self._product.model:
            return False
        if self._product.model not in _SIZES_GIB:
            return True
        size = _SIZE.search(word)
        return None if size is None else int(size[1]) == self._product.size_gib

    def has_part(self, part: str) -> bool | None:
        """The model's own name is in it; of other models', none."""
        found = gpu_model_name(part)
        if found is not None and found != self._product.model:
            return False
        return True if part == self._product.model else None


def fit_of(conditions: Sequence[Condition]) -> Fit | str:
    """Return what has to be bought so that all conditions hold for certain; else why that is not known."""
    if _holds(conditions, _device("gpu")):
        return Fit()
    if found := _wanted(conditions, "gpu", ""):
        return found
    named = {word for condition in conditions for word in condition.words if _PROFILE.fullmatch(word)}
    profiles = [
        Fit(profile=profile) if _holds(conditions, _device("mig", profile)) else _wanted(conditions, "mig", profile)
        for profile in sorted(named)
    ]
    found_profiles = [profile for profile in profiles if profile]
    if len(found_profiles) == 1 and not isinstance(found_profiles[0], str):
        return found_profiles[0]
    troubled = next((each for each in (found, *profiles) if isinstance(each, str) and each), "")
    return troubled or "which GPUs it is for is not known before they are there"


def is_about_gpus(conditions: Sequence[Condition]) -> bool:
    """True where devices of the driver may do, and no other's will."""
    other = Device(driver="other.example.com", attributes={}, capacity={}, is_all=True)
    ours = Device(driver=GPU_DRIVER, attributes={}, capacity={}, is_all=False)
    return any(condition.judge(other) is False for condition in conditions) and not any(
        condition.judge(ours) is False for condition in conditions
    )


def _wanted(conditions: Sequence[Condition], kind: str, profile: str) -> Fit | str:
    """The models for which it holds; a reason where their sizes cannot be told apart; empty where there are none."""
    fits, fails = set[_Product](), set[_Product]()
    for product in _products():
        is_fit = _holds(conditions, _device(kind, profile, product))
        (fits if is_fit else fails).add(product)
    models = frozenset(product.model for product in fits)
    mixed = [product for product in fails if product.model in models]
    if not mixed:
        return Fit(models=models, profile=profile) if models else ""
    least = int(min(product.size_gib for product in fits) * _REAL_RATIO_MIN * GIBIBYTE)
    if profile or any(product.size_gib * GIBIBYTE >= least for product in mixed):
        return f"{' and '.join(sorted({each.model for each in mixed}))} is sold in sizes that are not told apart"
    return Fit(models=models, memory_bytes_min=least)


def _products() -> Iterator[_Product]:
    for model in GPU_MODELS.values():
        known = () if model.memory_bytes is None else (model.memory_bytes // GIBIBYTE,)
        for size_gib in known or _SIZES_GIB[model.name]:
            yield _Product(model.name, size_gib)


def _device(kind: str, profile: str = "", product: _Product | None = None) -> Device:
    """A GPU, or a part of one, as far as it is known."""
    said: dict[str, object] = {"type": kind}
    if profile:
        said["profile"] = profile
    capacity: dict[str, object] = {}
    if product is not None:
        architecture, capability = _KINDS[product.model]
        said |= {
            "productName": _ProductName(product),
            "architecture": architecture,
            "cudaComputeCapability": capability,
        }
        if kind == "gpu":
            most_milli = product.size_gib * GIBIBYTE * 1000
            capacity = {"memory": Amount(int(most_milli * _REAL_RATIO_MIN), most_milli)}
    return Device(driver=GPU_DRIVER, attributes={GPU_DRIVER: said}, capacity={GPU_DRIVER: capacity}, is_all=False)


def _holds(conditions: Sequence[Condition], device: Device) -> bool:
    return all(condition.judge(device) is True for condition in conditions)
