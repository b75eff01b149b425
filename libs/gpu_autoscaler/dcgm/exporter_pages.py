"""Scrapes DCGM exporters and parses their pages into typed samples, dropping impossible values.

Parsed line by line, so that a broken line costs one value. Label texts repeat for every counter of a GPU and are parsed
once per page. Format: Prometheus documentation, "Exposition formats"; labels and units: NVIDIA dcgm-exporter,
README and `etc/default-counters.csv` (read 2026-11-21).
"""

import asyncio
import re
from collections.abc import Mapping

import aiohttp
import msgspec

from gpu_autoscaler.events.gpu import GpuSample
from gpu_autoscaler.model.gpu import gpu_model_name

MEBIBYTE = 2**20

UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"
ENGINE_ACTIVE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
MEMORY_USED = "DCGM_FI_DEV_FB_USED"
MEMORY_FREE = "DCGM_FI_DEV_FB_FREE"
MEMORY_RESERVED = "DCGM_FI_DEV_FB_RESERVED"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
POWER = "DCGM_FI_DEV_POWER_USAGE"
XID = "DCGM_FI_DEV_XID_ERRORS"
ROW_REMAP_FAILURE = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
DOUBLE_BIT_ERRORS = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"  # not exported by default: unknown unless configured

# Possible values, in the exporter's units. Excluded are DCGM's blank values (9223372036854775794 and 140737488355328,
# dcgm_structs.h, "Blank values") and values that users reported, such as 4294967295 %.
_MEMORY_MIB_MAX = 2.0**20
RANGES: Mapping[str, tuple[float, float]] = {
    UTILIZATION: (0.0, 100.0),
    ENGINE_ACTIVE: (0.0, 1.0),
    MEMORY_USED: (0.0, _MEMORY_MIB_MAX),
    MEMORY_FREE: (0.0, _MEMORY_MIB_MAX),
    MEMORY_RESERVED: (0.0, _MEMORY_MIB_MAX),
    TEMPERATURE: (-40.0, 150.0),
    POWER: (0.0, 5000.0),
    XID: (0.0, 9999.0),
    ROW_REMAP_FAILURE: (0.0, 1.0),
    DOUBLE_BIT_ERRORS: (0.0, 1e9),
}

_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
# A page federated by Prometheus has exported_ labels; older exporters used the last spelling.
_POD_LABELS = (("exported_namespace", "exported_pod"), ("namespace", "pod"), ("pod_namespace", "pod_name"))

_Values = dict[str, float]


class Page(msgspec.Struct, frozen=True):
    """One parsed page of an exporter."""

    gpus: tuple[GpuSample, ...]  # in page order; MIG instances are separate samples
    lines_broken_count: int  # unreadable lines of the counters above


def parse_page(text: str) -> Page:
    """Return the samples of a page. Never raises: unreadable lines are counted, impossible values are None."""
    gpus: dict[tuple[str, str], tuple[dict[str, str], _Values]] = {}
    by_label_text: dict[str, _Values] = {}
    broken_count = 0
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        limits = RANGES.get(name)
        if limits is None:
            continue
        label_text, end, value_text = rest.rpartition("}")
        values = by_label_text.get(label_text)
        try:
            value = float(value_text.split(None, 1)[0])
        except (ValueError, IndexError):
            broken_count += 1
            continue
        if values is None:
            labels = dict(_LABEL.findall(label_text))
            if not brace or not end or "gpu" not in labels:
                broken_count += 1
                continue
            # A merged page may contain several devices with one index: the UUID distinguishes them.
            entry = gpus.setdefault((_index(labels), labels.get("UUID", "")), (labels, {}))
            values = by_label_text[label_text] = entry[1]
        if limits[0] <= value <= limits[1]:
            values[name] = value
    return Page(tuple(_sample(index, labels, values) for (index, _), (labels, values) in gpus.items()), broken_count)


def _index(labels: Mapping[str, str]) -> str:
    """Return the GPU's index, followed by a colon and the MIG instance if there is one."""
    instance = labels.get("GPU_I_ID")
    return f"{labels['gpu']}:{instance}" if instance else labels["gpu"]


def _sample(index: str, labels: Mapping[str, str], values: _Values) -> GpuSample:
    return GpuSample(
        gpu=index,
        gpu_uuid=labels.get("UUID", ""),
        gpu_model=gpu_model_name(labels.get("modelName", "")),
        utilization_ratio=_utilization_ratio(values, is_slice=":" in index),
        memory_used_bytes=_bytes(values.get(MEMORY_USED)),
        memory_total_bytes=_bytes(_total_mib(values)),
        temperature_celsius=values.get(TEMPERATURE),
        power_watts=values.get(POWER),
        pod=_pod(labels),
        xid=_whole(values.get(XID)),
        is_row_remap_failed=None if (failed := values.get(ROW_REMAP_FAILURE)) is None else failed > 0,
        ecc_double_bit_count=_whole(values.get(DOUBLE_BIT_ERRORS)),
    )


def _utilization_ratio(values: _Values, *, is_slice: bool) -> float | None:
    """Return the share of time that the GPU computed since the page before; without it, its utilization.

    Utilization covers a fraction of a second: six reads of one load that computes half of the time were 1 to 33 %
    (tests/unit/dcgm/h200). An activity of zero is verified by it, because the counter was seen stuck. DCGM reports no
    utilization for MIG instances (NVIDIA DCGM, "Feature overview: MIG"; docs/decisions.md#utilization-of-a-gpu).
    """
    active, percent = values.get(ENGINE_ACTIVE), values.get(UTILIZATION)
    return active if active or is_slice or percent is None else percent / 100


def _total_mib(values: _Values) -> float | None:
    """Return used + free + reserved: the total is not exported by default, and reserved only by some exporters."""
    used, free = values.get(MEMORY_USED), values.get(MEMORY_FREE)
    return None if used is None or free is None else used + free + values.get(MEMORY_RESERVED, 0.0)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else round(mib * MEBIBYTE)


def _pod(labels: Mapping[str, str]) -> str | None:
    """Return `namespace/name` of the pod that holds the GPU, None for an idle one."""
    for namespace_label, pod_label in _POD_LABELS:
        namespace, pod = labels.get(namespace_label), labels.get(pod_label)
        if namespace and pod:
            return f"{namespace}/{pod}"
    return None


SCRAPE_SECONDS_MAX = 2.0  # wall time of one exporter, so that a hanging one delays the scrape by at most this
CONCURRENT_SCRAPES_MAX = 64
PAGE_BYTES_MAX = 4 * 2**20  # far more than 8 GPUs with all counters


class Scraper:
    """Scrapes exporters. None means no answer, so that its GPUs are unknown."""

    def __init__(
        self, *, scrape_seconds_max: float = SCRAPE_SECONDS_MAX, concurrent_scrapes_max: int = CONCURRENT_SCRAPES_MAX
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=scrape_seconds_max)
        self._slots = asyncio.Semaphore(concurrent_scrapes_max)
        self._session: aiohttp.ClientSession | None = None

    async def scrape(self, urls: Mapping[str, str]) -> dict[str, Page | None]:
        """Return a page for each name's URL, None without an answer. Never raises for an exporter."""
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))

    async def _page(self, url: str) -> Page | None:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(timeout=self._timeout, auto_decompress=True)
        async with self._slots:
            try:
                async with self._session.get(url) as response:
                    if response.status != 200:
                        return None
                    content = bytearray()
                    async for chunk in response.content.iter_any():
                        content += chunk
                        if len(content) > PAGE_BYTES_MAX:
                            return None
            except (aiohttp.ClientError, TimeoutError, ValueError):  # ValueError: an invalid URL
                return None
        return parse_page(content.decode("utf-8", errors="replace"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
