"""Catalog of offers of Karpenter's cloud, from a file: Karpenter reports neither offers nor prices.

    [{"instance_type": "g5.xlarge", "zones": ["eu-west-1a"], "gpu_model": "A10G",
      "resources": {"cpu": "3920m", "memory": "14Gi", "nvidia.com/gpu": "1"},
      "usd_per_hour": {"on-demand": 1.006, "spot": 0.42}}]

`resources` are allocatable Kubernetes quantities. Use one row per zone where prices differ by zone. A changed file is
read again; `gpu-autoscaler prices catalog` writes one.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from gpu_autoscaler.kube.translate.common import amounts
from gpu_autoscaler.model.errors import ConfigError, PermanentError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_MODELS
from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources
from gpu_autoscaler.providers.allocatable import PODS_PER_NODE

_DISK_BYTES = 20 * GIBIBYTE  # root volume that Karpenter's AWS provider assumes (`blockDeviceMappings`)
_Usd = Annotated[float, Meta(gt=0)]
# A valid label value in Kubernetes.
_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]


log = structlog.get_logger()


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance type in zones where it has the same price."""

    instance_type: _Word
    zones: Annotated[tuple[_Word, ...], Meta(min_length=1)]
    resources: dict[str, str]
    usd_per_hour: Annotated[dict[CapacityType, _Usd | None], Meta(min_length=1)]  # null: price unknown
    gpu_model: str | None = None
    gpu_memory_gib: Annotated[int, Meta(gt=0)] | None = None  # of one GPU; null: that of the model
    boot_seconds: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    labels: dict[str, str] = {}  # other node labels, for requirements of NodeOverlays


class Catalog:
    """Offers of a file, read again when it changes; an invalid change keeps the previous content."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._stamp = _stamp(path)
        self._offers, self._labels = _read(path)

    def offers(self) -> tuple[Offer, ...]:
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._offers, self._labels = _read(self._path)
            except ConfigError as exc:
                log.warning("offers file rejected", error=str(exc), effect="the previous content stays")
        return self._offers

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of each type in the file."""
        return self._labels


def _stamp(path: str) -> tuple[int, int] | None:
    """Return what changes with the file's content; a ConfigMap's update replaces the file."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def offers_in(path: str) -> tuple[Offer, ...]:
    """Return the file's offers, each once. Raises ConfigError naming the row."""
    return _read(path)[0]


def _read(path: str) -> tuple[tuple[Offer, ...], dict[str, dict[str, str]]]:
    """Return the offers, and the labels of each type."""
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=tuple[Row, ...])
    except OSError as exc:
        raise ConfigError("provider karpenter", [f"{path}: cannot be read: {exc.strerror}"]) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError("provider karpenter", [f"{path}: is not a list of offers: {exc}"]) from exc
    offers: dict[str, Offer] = {}
    labels: dict[str, dict[str, str]] = {}
    violations = []
    for row in rows:
        try:
            row_offers = _offers_of(row)
        except PermanentError as exc:
            violations.append(f"{path}: {exc}")
            continue
        labels[row.instance_type] = labels.get(row.instance_type, {}) | row.labels
        for offer in row_offers:
            if offer.key in offers:
                violations.append(f"{path}: {offer.key} occurs twice")
            offers[offer.key] = offer
    if not rows:
        violations.append(f"{path}: is empty; add at least one instance type")
    if violations:
        raise ConfigError("provider karpenter", violations)
    return tuple(offers[key] for key in sorted(offers)), labels


def _offers_of(row: Row) -> list[Offer]:
    declared = amounts(row.resources, of=row.instance_type)
    if declared.cpu_milli <= 0 or declared.memory_bytes <= 0:
        raise PermanentError(f"{row.instance_type}: resources lack cpu or memory")
    resources = _with_defaults(declared)
    known = GPU_MODELS.get(row.gpu_model or "")
    memory_bytes = row.gpu_memory_gib * GIBIBYTE if row.gpu_memory_gib else known.memory_bytes if known else None
    return [
        Offer(
            instance_type=row.instance_type,
            zone=zone,
            capacity_type=capacity_type,
            resources=resources,
            gpu_model=row.gpu_model,
            gpu_memory_bytes=memory_bytes,
            price_micro_usd_per_hour=None if usd is None else round(usd * MICRO_USD_PER_USD),
            boot_seconds=row.boot_seconds,
        )
        for zone in row.zones
        for capacity_type, usd in row.usd_per_hour.items()
    ]


def _with_defaults(declared: Resources) -> Resources:
    return msgspec.structs.replace(
        declared,
        pod_count=declared.pod_count or PODS_PER_NODE,
        ephemeral_storage_bytes=declared.ephemeral_storage_bytes or _DISK_BYTES,
    )


def rows_of(offers: Iterable[Offer]) -> list[Row]:
    """Return the offers as rows of a file that `offers_in` reads as the same offers."""
    sorted_offers = sorted(offers, key=lambda offer: offer.key)
    rows: dict[tuple[str, str], Row] = {}
    for offer in sorted_offers:
        price = offer.price_micro_usd_per_hour
        usd = {offer.capacity_type: None if price is None else price / MICRO_USD_PER_USD}
        where = (offer.instance_type, offer.zone)
        known = rows.get(where)
        rows[where] = (
            msgspec.structs.replace(known, usd_per_hour={**known.usd_per_hour, **usd})
            if known is not None
            else Row(
                instance_type=offer.instance_type,
                zones=(offer.zone,),
                resources=_quantities(offer.resources),
                usd_per_hour=usd,
                gpu_model=offer.gpu_model,
                gpu_memory_gib=None if offer.gpu_memory_bytes is None else offer.gpu_memory_bytes // GIBIBYTE or None,
                boot_seconds=offer.boot_seconds,
            )
        )
    return list(rows.values())


def _quantities(resources: Resources) -> dict[str, str]:
    quantities = {
        "cpu": f"{resources.cpu_milli}m",
        "memory": str(resources.memory_bytes),
        "ephemeral-storage": str(resources.ephemeral_storage_bytes),
        "pods": str(resources.pod_count),
        GPU_RESOURCE: str(resources.gpu_count) if resources.gpu_count else "",
        **{name: str(count) for name, count in resources.slices},
    }
    return {name: text for name, text in quantities.items() if text}
