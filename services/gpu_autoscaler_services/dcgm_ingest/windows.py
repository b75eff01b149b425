"""Summaries of samples per minute. Windows are aligned to whole minutes, so that a restart does not move them."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSample, GpuSummary
from gpu_autoscaler.model.ids import NodeUid

WINDOW_SECONDS = 60
EPOCH = 1  # versions are Unix seconds, which never restart


def window_start(at: datetime) -> datetime:
    """Return the start of the window of `at`."""
    return datetime.fromtimestamp(int(at.timestamp()) // WINDOW_SECONDS * WINDOW_SECONDS, UTC)


class Window:
    """One node's scrapes within one minute."""

    def __init__(self, node_uid: NodeUid, node_name: str, started_at: datetime) -> None:
        self.started_at = started_at
        self._node_uid = node_uid
        self._node_name = node_name
        self._expected_count = 0
        self._answered_count = 0
        self._samples: dict[tuple[str, str], list[GpuSample]] = {}

    def add(self, gpus: Sequence[GpuSample] | None) -> None:
        """Count one scrape; None if it was not answered."""
        self._expected_count += 1
        if gpus is not None:
            self._answered_count += 1
            for sample in gpus:
                self._samples.setdefault((sample.gpu, sample.gpu_uuid), []).append(sample)

    def summary(self) -> GpuNodeSummarized:
        """Return the summary. An exporter that never answered gives no GPUs, not idle ones."""
        return GpuNodeSummarized(
            epoch=EPOCH,
            version=int(self.started_at.timestamp()),
            node_uid=self._node_uid,
            node_name=self._node_name,
            window_started_at=self.started_at,
            window_seconds=float(WINDOW_SECONDS),
            scrapes_expected_count=self._expected_count,
            scrapes_answered_count=self._answered_count,
            gpus=tuple(_summary(*key, samples) for key, samples in self._samples.items()),
        )


def _summary(gpu: str, gpu_uuid: str, samples: Sequence[GpuSample]) -> GpuSummary:
    """Return the summary of one GPU; values that no sample has are None."""
    busy = _known(sample.utilization_ratio for sample in samples)
    watts = _known(sample.power_watts for sample in samples)
    degrees = _known(sample.temperature_celsius for sample in samples)
    xids = [sample.xid for sample in samples if sample.xid is not None]
    pods = {sample.pod for sample in samples}
    remapping = [sample.is_row_remap_failed for sample in samples if sample.is_row_remap_failed is not None]
    double_bits = [sample.ecc_double_bit_count for sample in samples if sample.ecc_double_bit_count is not None]
    return GpuSummary(
        gpu=gpu,
        gpu_uuid=gpu_uuid,
        samples_count=len(samples),
        utilization_ratio_min=min(busy, default=None),
        utilization_ratio_mean=_mean(busy),
        utilization_ratio_max=max(busy, default=None),
        memory_used_bytes_max=max(
            (s.memory_used_bytes for s in samples if s.memory_used_bytes is not None), default=None
        ),
        memory_total_bytes=samples[-1].memory_total_bytes,
        temperature_celsius_min=min(degrees, default=None),
        temperature_celsius_max=max(degrees, default=None),
        power_watts_mean=_mean(watts),
        pod=pods.pop() if len(pods) == 1 else None,
        xid_last=xids[-1] if xids else None,
        xids=tuple(dict.fromkeys(xid for xid in xids if xid)),
        is_row_remap_failed=remapping[-1] if remapping else None,
        ecc_double_bit_count=double_bits[-1] if double_bits else None,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, rounded so that it does not depend on the order of samples."""
    return round(sum(values) / len(values), 6) if values else None
