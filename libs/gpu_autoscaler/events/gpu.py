"""GPU telemetry: one message per node and scrape, or per node and minute; never one per GPU."""

import msgspec

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.observed import Instant


class GpuSample(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One GPU at one time. None: the exporter reported nothing, or an impossible value (a sentinel)."""

    gpu: str  # index on the node, as the exporter names it
    gpu_uuid: str
    gpu_model: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None  # memory in use; None: unknown
    memory_total_bytes: int | None = None  # used + free + reserved; None: unknown
    temperature_celsius: float | None = None  # temperature of the chip; None: unknown
    power_watts: float | None = None  # power draw; None: unknown
    pod: str | None = None  # namespace/name of the pod that holds it; None: none, or unknown
    xid: int | None = None  # the latest error since the driver was loaded, however old; 0: none; None: unknown
    is_row_remap_failed: bool | None = None  # defective memory could not be remapped; None: unknown
    ecc_double_bit_count: int | None = None  # uncorrectable memory errors since the driver was loaded; None: unknown


class GpuNodeSampled(Fact, frozen=True, kw_only=True):
    """One scrape of the exporter of a node. For display; decisions use the summaries."""

    node_uid: NodeUid
    node_name: str
    sampled_at: Instant
    gpus: tuple[GpuSample, ...]
    lines_broken_count: int = 0  # lines of the exporter that could not be read

    def subject(self) -> str:
        """With the node as third token."""
        return f"{self.subject_root()}.{self.node_uid}"

    def condition(self) -> str | None:
        """One fact per node and time."""
        return f"gpu_node_sampled/{self.node_uid}/{self.sampled_at.isoformat()}"

    def entity(self) -> str | None:
        return f"node/{self.node_uid}"


class GpuSummary(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One GPU over a window. None: no valid value."""

    gpu: str  # index on the node, as the exporter names it
    gpu_uuid: str
    samples_count: int  # scrapes that reported it
    utilization_ratio_min: float | None = None  # lowest of all samples, 0 to 1; None: unknown
    utilization_ratio_mean: float | None = None  # mean of all samples, 0 to 1; None: unknown
    utilization_ratio_max: float | None = None  # highest of all samples, 0 to 1; None: unknown
    memory_used_bytes_max: int | None = None  # most memory in use; None: unknown
    memory_total_bytes: int | None = None  # used + free + reserved; None: unknown
    temperature_celsius_min: float | None = None  # lowest of all samples; None: unknown
    temperature_celsius_max: float | None = None  # highest of all samples; None: unknown
    power_watts_mean: float | None = None  # mean of all samples; None: unknown
    pod: str | None = None  # namespace/name of the pod that held it throughout; None: none or several
    xid_last: int | None = None  # the latest error since the driver was loaded; 0: none; None: unknown
    xids: tuple[int, ...] = ()  # distinct errors of all samples, in order
    is_row_remap_failed: bool | None = None  # defective memory could not be remapped; None: unknown
    ecc_double_bit_count: int | None = None  # uncorrectable memory errors since the driver was loaded; None: unknown


class GpuNodeSummarized(Versioned, frozen=True, kw_only=True):
    """A node's GPUs over one minute. `version` is the window's start in Unix seconds."""

    node_uid: NodeUid
    node_name: str
    window_started_at: Instant  # start of the window
    window_seconds: float  # length of the window
    scrapes_expected_count: int  # scrapes that the window has time for
    scrapes_answered_count: int  # zero: no telemetry, which is not idleness
    gpus: tuple[GpuSummary, ...]

    def subject(self) -> str:
        """With the node as third token."""
        return f"{self.subject_root()}.{self.node_uid}"

    def condition(self) -> str | None:
        """One fact per node and window."""
        return f"gpu_node_summarised/{self.node_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"node/{self.node_uid}"
