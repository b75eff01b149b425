"""Pods of a recorded cluster trace as job requests, for the demo and for scoring.

The format is that of Alibaba's openb traces (github.com/alibaba/clusterdata, cluster-trace-gpu-v2023): a CSV file,
plain or gzipped, with at least the columns of COLUMNS; times are seconds since the start of the trace.
"""

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest

COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
POD_LIST = "openb_pod_list_default.csv"
_CPU_MILLI_MIN, _MEMORY_MIB_MIN = 1, 1
SECONDS_MIN = 1.0  # minimum duration of a pod


class TracePod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of the trace, in trace time."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpu_count: int  # fractions are rounded up to one
    created_seconds: float
    duration_seconds: float
    qos: str = ""  # QoS class; empty where the list has none


def find_pod_list(source: str) -> Path:
    """Return the pod list that `openb:FOLDER`, `openb:FILE` or a bare path names. Raises ConfigError."""
    kind, separator, rest = source.partition(":")
    if separator and kind != "openb":
        raise ConfigError("--trace", [f"unknown kind of trace {kind!r}; known: openb (as in openb:FOLDER)"])
    path = Path(rest if separator else source).expanduser()
    names = (POD_LIST, f"{POD_LIST}.gz", f"pods/{POD_LIST}", f"pods/{POD_LIST}.gz")
    candidates = [path] if path.is_file() else [path / name for name in names]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ConfigError("--trace", [f"no pod list in {path}; looked for {', '.join(names)}"])
    return found


def read_pods(path: Path, count: int) -> tuple[TracePod, ...]:
    """Return the last `count` pods by creation time, oldest first. Raises ConfigError naming file and line."""
    pods = sorted(_rows(path), key=lambda pod: (pod.created_seconds, pod.name))
    if len(pods) < count:
        raise ConfigError(str(path), [f"has {len(pods)} pods, {count} were requested"])
    return tuple(pods[len(pods) - count :])


def read_pods_between(path: Path, from_seconds: float, to_seconds: float) -> tuple[TracePod, ...]:
    """Return the pods created within the window, oldest first. Raises ConfigError naming file and line."""
    pods = sorted(_rows(path), key=lambda pod: (pod.created_seconds, pod.name))
    return tuple(pod for pod in pods if from_seconds <= pod.created_seconds < to_seconds)


def _rows(path: Path) -> Iterator[TracePod]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        reader = csv.DictReader(io.StringIO(content.decode()))
    except UnicodeDecodeError as exc:
        raise ConfigError(str(path), [f"is not UTF-8 text: {exc}"]) from exc
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}:1", [f"no column {', '.join(missing)}; needed: {', '.join(COLUMNS)}"])
    for row in reader:
        try:
            yield _pod(row)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{path}:{reader.line_num}", [str(exc)]) from exc


def _pod(row: Mapping[str, str]) -> TracePod:
    created = _number(row, "creation_time")
    deleted = _number(row, "deletion_time")
    if deleted < created:
        raise ValueError(f"deletion_time {deleted:g} is before creation_time {created:g}")
    gpu_milli, gpu_count = _number(row, "gpu_milli"), int(_number(row, "num_gpu"))
    if not row["name"]:
        raise ValueError("name is empty")
    return TracePod(
        name=row["name"],
        cpu_milli=max(_CPU_MILLI_MIN, int(_number(row, "cpu_milli"))),
        memory_mib=max(_MEMORY_MIB_MIN, int(_number(row, "memory_mib"))),
        gpu_count=max(gpu_count, 1) if gpu_milli > 0 else gpu_count,
        created_seconds=created,
        duration_seconds=max(SECONDS_MIN, deleted - created),
        qos=row.get("qos") or "",
    )


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError as exc:
        raise ValueError(f"{column} is {row[column]!r}, not a number") from exc
    if not 0 <= value < 1e12:
        raise ValueError(f"{column} is {value:g}, out of range")
    return value


def as_request(pod: TracePod, *, run_seconds: float, number: int) -> JobRequested:
    """Return the pod as a job that runs for `run_seconds` of cluster time."""
    return JobRequested(
        job_id=JobId(f"trace-{number:05d}-{pod.name}"[:50].rstrip("-").lower()),
        job_name=pod.name,
        project_id="trace",
        gpu_requirements=GpuRequirements(gpu_count=pod.gpu_count),
        container=ContainerRequest(image="registry.example/trace:1"),
        resources=ResourceRequest(cpu=f"{pod.cpu_milli}m", memory=f"{pod.memory_mib}Mi", ephemeral_storage="1Gi"),
        workload_type="batch",
        run_seconds=run_seconds,
    )
