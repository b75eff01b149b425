"""Scenarios from recorded traces: the window of each, and assumptions where the trace is silent.

The traces are read from a folder (GPU_AUTOSCALER_TRACES) in the formats of the loaders below. The
repository contains none of them.
"""

import csv
import gzip
import io
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler.sim.actors.checkpointing import CHECKPOINTING_WORKLOAD, CheckpointSettings
from gpu_autoscaler.sim.cluster.cloud import TYPES
from gpu_autoscaler.sim.scoring.scenario import (
    HOURS_MAX,
    JOBS_PER_HOUR,
    Arrival,
    Reclaim,
    Scenario,
    Shortage,
    of_length,
    preemptible_jobs,
)
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, ZONES, offers_of

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
    pod_list = next((candidate for candidate in candidates if candidate.is_file()), None)
    if pod_list is None:
        raise ConfigError("--trace", [f"no pod list in {path}; looked for {', '.join(names)}"])
    return pod_list


def read_pods(path: Path, count: int) -> tuple[TracePod, ...]:
    """Return the last `count` pods by creation time, oldest first. Raises ConfigError naming file and line."""
    pods = sorted(_pods_in(path), key=lambda pod: (pod.created_seconds, pod.name))
    if len(pods) < count:
        raise ConfigError(str(path), [f"has {len(pods)} pods, {count} were requested"])
    return tuple(pods[len(pods) - count :])


def read_pods_between(path: Path, from_seconds: float, to_seconds: float) -> tuple[TracePod, ...]:
    """Return the pods created within the window, oldest first. Raises ConfigError naming file and line."""
    pods = sorted(_pods_in(path), key=lambda pod: (pod.created_seconds, pod.name))
    return tuple(pod for pod in pods if from_seconds <= pod.created_seconds < to_seconds)


def _pods_in(path: Path) -> Iterator[TracePod]:
    reader = _csv_reader(path)
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


DAY_SECONDS = 86_400.0

# ---- openb: pods of a production cluster

OPENB_FIRST_DAY = 115  # earlier days hold few pods besides those that had started before
OPENB_DAYS = 34
OPENB_RUN_SECONDS_MAX = 6 * 3600.0  # longer pods are cut: one in ten
# Types that fit every shape of the list: 6 to 20 CPUs per GPU, and 0 to 8 GPUs per pod.
OPENB_TYPES = tuple(
    entry
    for entry in INSTANCE_CATALOG
    if entry.name.partition(".")[0] in ("g4dn", "g5", "g6", "m5") and entry.name not in ("g4dn.2xlarge", "g5.2xlarge")
)
_OPENB_PRIORITIES = {"LS": "high", "Guaranteed": "high", "Burstable": "medium", "BE": "low"}


def openb(folder: Path, seed: int, hours: float) -> Scenario:
    """Return the pods of a window that starts on a day chosen by the seed; each is a job of one member.

    Latency-sensitive pods (`LS`, `Guaranteed`) get high priority and never run on spot; best-effort pods (`BE`) get low
    priority. GPU fractions are rounded up to one GPU; no GPU model is requested, as the list has none.
    """
    path = find_pod_list(str(folder / "openb-gpu-2023"))
    from_seconds = (OPENB_FIRST_DAY + (7 * seed) % OPENB_DAYS) * DAY_SECONDS
    pods = read_pods_between(path, from_seconds, from_seconds + hours * 3600.0)
    return Scenario(
        name="openb",
        description=f"openb pod list: {len(pods)} pods created in {hours:g} h from day {from_seconds / DAY_SECONDS:g}, "
        f"as jobs of at most {OPENB_RUN_SECONDS_MAX / 3600:g} h",
        hours=hours,
        seed=seed,
        arrivals=tuple(
            Arrival(at_seconds=pod.created_seconds - from_seconds, request=_of_pod(pod, number))
            for number, pod in enumerate(pods)
        ),
        offers=offers_of(OPENB_TYPES),
    )


def _of_pod(pod: TracePod, number: int) -> JobRequested:
    request = as_request(pod, run_seconds=min(pod.duration_seconds, OPENB_RUN_SECONDS_MAX), number=number)
    priority = _OPENB_PRIORITIES.get(pod.qos, "medium")
    return replace(request, priority=priority, preemptible=priority != "high", max_duration_hours=HOURS_MAX)


# ---- philly: busy nodes per minute

PHILLY_NODES_A_JOB = 10
PHILLY_SLACK_NODES = 6  # hysteresis: the trace moves by a few nodes each minute
PHILLY_DAYS = 72


def philly(folder: Path, seed: int, hours: float) -> Scenario:
    """Return jobs in proportion to the busy nodes of a window: one job of four GPUs for every ten nodes.

    When the trace falls, the oldest job ends. All jobs are training jobs that may run on spot.
    """
    path = folder / "philly" / "philly_node_sequence.csv.gz"
    first = (7 * seed) % PHILLY_DAYS * 1440
    busy_counts = [int(row["active"]) for row in _csv_reader(path)][first : first + int(hours * 60) + 1]
    if not busy_counts:
        raise ConfigError(str(path), [f"has no minute {first}"])
    spans = _spans(busy_counts)
    return Scenario(
        name="philly",
        description=f"Philly, {hours:g} h from minute {first}: four-GPU jobs, one per {PHILLY_NODES_A_JOB} busy nodes",
        hours=hours,
        seed=seed,
        arrivals=tuple(
            Arrival(at_seconds=from_minute * 60.0, request=_four_gpus(number, (to_minute - from_minute) * 60.0))
            for number, (from_minute, to_minute) in enumerate(spans)
        ),
        offers=offers_of(TYPES),
    )


def _spans(busy_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end minute of each job: as many jobs at a time as the trace has tens of busy nodes."""
    starts: list[int] = []
    spans: list[tuple[int, int]] = []
    for minute, count in enumerate(busy_counts):
        wanted = count / PHILLY_NODES_A_JOB
        slack = PHILLY_SLACK_NODES / PHILLY_NODES_A_JOB
        while len(starts) + slack < wanted:
            starts.append(minute)
        while starts and starts[0] < minute and len(starts) - slack > wanted:
            spans.append((starts.pop(0), minute))
    return sorted([*spans, *((from_minute, len(busy_counts)) for from_minute in starts)])


def _four_gpus(number: int, run_seconds: float) -> JobRequested:
    name = f"philly-{number:04d}"
    return JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id="philly",
        gpu_requirements=GpuRequirements(gpu_count=4),
        container=ContainerRequest(image="work:1"),
        resources=ResourceRequest(cpu="16", memory="64Gi"),
        workload_type=CHECKPOINTING_WORKLOAD,
        max_duration_hours=HOURS_MAX,
        run_seconds=run_seconds,
    )


# ---- bamboo: sizes of recorded spot fleets

BAMBOO_ZONES = {
    ZONES[0]: ("aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv", 120.0),
    ZONES[1]: ("v100x1-east1c.txt", 30.0),
    ZONES[2]: ("a100x1-east1b.txt", 30.0),
}  # by zone: its trace, and the notice that this cloud gives
BAMBOO_STEP_SECONDS = 300.0  # polls within a step are merged: several series interleave in the files


def bamboo(folder: Path, seed: int, hours: float) -> Scenario:
    """Return steady jobs that may all run on spot, in three zones that each follow one recorded spot fleet.

    When the recorded fleet shrinks by a share, each spot machine of the zone is reclaimed with that probability; the
    zone then has no spot capacity until the recorded fleet grows.
    """
    reclaims: list[Reclaim] = []
    shortages: list[Shortage] = []
    for zone, (name, notice_seconds) in BAMBOO_ZONES.items():
        counts = fleet_sizes(folder / "bamboo-spot" / name)
        disturb = len(counts) * BAMBOO_STEP_SECONDS
        range_seconds = max(BAMBOO_STEP_SECONDS, disturb - hours * 3600.0)
        offset = int(((seed - 1) * hours * 3600.0) % range_seconds // BAMBOO_STEP_SECONDS)
        window = counts[offset : offset + int(hours * 3600.0 // BAMBOO_STEP_SECONDS)]
        reclaims += _reclaims(window, zone, notice_seconds)
        shortages += _shortages(window, zone)
    return Scenario(
        name="bamboo",
        description=f"{JOBS_PER_HOUR:g} spot jobs per hour, in zones that follow three recorded spot fleets",
        hours=hours,
        seed=seed,
        arrivals=preemptible_jobs(random.Random(f"bamboo/{seed}"), hours, JOBS_PER_HOUR),
        offers=offers_of(TYPES),
        reclaims=tuple(sorted(reclaims, key=lambda reclaim: (reclaim.at_seconds, reclaim.zone))),
        shortages=tuple(shortages),
    )


# A save every 15 minutes takes 5 to 90 s, short for small models and long for large ones.
CHECKPOINTS = CheckpointSettings(
    every_seconds=900.0, write_seconds_min=5.0, write_seconds_max=90.0, annotates=True, saves_at_end=False
)


def bamboo_checkpoints(folder: Path, seed: int, hours: float) -> Scenario:
    """Return the `bamboo` scenario with jobs that all checkpoint and run as long as the pods of openb."""
    world = bamboo(folder, seed, hours)
    pods = read_pods_between(find_pod_list(str(folder / "openb-gpu-2023")), 0.0, math.inf)
    lengths = [min(pod.duration_seconds, OPENB_RUN_SECONDS_MAX) for pod in pods if pod.gpu_count > 0]
    rng = random.Random(f"bamboo-checkpoints/{seed}")
    return replace(
        world,
        name="bamboo-checkpoints",
        description=f"{world.description}; all of them train for as long as openb's pods ran (at most "
        f"{OPENB_RUN_SECONDS_MAX / 3600:g} h) and save every {CHECKPOINTS.every_seconds / 60:g} min, which takes "
        f"{CHECKPOINTS.write_seconds_min:g} to {CHECKPOINTS.write_seconds_max:g} s",
        arrivals=tuple(
            replace(
                arrival,
                request=of_length(
                    replace(arrival.request, workload_type=CHECKPOINTING_WORKLOAD), round(rng.choice(lengths), 1)
                ),
            )
            for arrival in world.arrivals
        ),
        checkpoints=CHECKPOINTS,
    )


def fleet_sizes(path: Path) -> list[int]:
    """Return the number of machines in each step of BAMBOO_STEP_SECONDS of a recorded fleet.

    Two formats: `hours,count`, and `date, time, count`. Raises ConfigError naming the file.
    """
    try:
        lines = [line.replace(",", " ").split() for line in path.read_text().splitlines() if line.strip()]
        if len(lines[0]) == 2:
            polls = [(float(hours) * 3600.0, int(count)) for hours, count in lines]
        else:
            polls_by_date = sorted(
                (datetime.fromisoformat(f"{day}T{time}+00:00"), int(count)) for day, time, count in lines
            )
            polls = [((at - polls_by_date[0][0]).total_seconds(), count) for at, count in polls_by_date]
    except (OSError, ValueError, IndexError) as exc:
        raise ConfigError(str(path), [f"is not a list of fleet sizes: {exc}"]) from exc
    last = {int(at // BAMBOO_STEP_SECONDS): count for at, count in polls}
    counts, known = [], polls[0][1]
    for step in range(max(last) + 1):
        known = last.get(step, known)
        counts.append(known)
    return counts


def _reclaims(counts: Sequence[int], zone: str, notice_seconds: float) -> Iterator[Reclaim]:
    for step, (before, after) in enumerate(itertools.pairwise(counts), 1):
        if after < before:
            yield Reclaim(
                at_seconds=step * BAMBOO_STEP_SECONDS,
                zone=zone,
                ratio=round((before - after) / before, 4),
                notice_seconds=notice_seconds,
            )


def _shortages(counts: Sequence[int], zone: str) -> Iterator[Shortage]:
    started_at: float | None = None
    for step, (before, after) in enumerate(itertools.pairwise(counts), 1):
        at = step * BAMBOO_STEP_SECONDS
        if after < before and started_at is None:
            started_at = at
        elif after > before and started_at is not None:
            yield Shortage(zone=zone, from_seconds=started_at, to_seconds=at)
            started_at = None
    if started_at is not None:
        yield Shortage(zone=zone, from_seconds=started_at, to_seconds=len(counts) * BAMBOO_STEP_SECONDS)


def _csv_reader(path: Path) -> "csv.DictReader[str]":
    """Return a reader of the file, plain or gzipped. Raises ConfigError where it cannot be read or is no UTF-8 text."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return csv.DictReader(io.StringIO(content.decode()))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(str(path), [f"cannot be read: {exc}"]) from exc
