"""Scenes cut from real traces: which window, and what was made of what the trace does not say.

A folder of traces is handed in (GPU_AUTOSCALER_TRACES); its files have the forms that `openb.py` and the loaders below
name. Nothing of them is kept in the repository.
"""

import csv
import gzip
import io
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest
from gpu_autoscaler.sim.cloud import TYPES
from gpu_autoscaler.sim.openb import TracePod, as_request, find_pod_list, read_pods_between
from gpu_autoscaler.sim.saving import SAVING_WORK, Saving
from gpu_autoscaler.sim.scene import Arrival, Reclaim, Scene, Shortage
from gpu_autoscaler.sim.scenes import HOURS_MAX, JOBS_PER_HOUR, preemptible_jobs
from gpu_autoscaler.simcluster.offers import CATALOGUE, ZONES, offers_of

DAY_SECONDS = 86_400.0

# ---- openb: pods of a production cluster

OPENB_FIRST_DAY = 115  # before it the list holds pods that stayed from earlier times, and few others
OPENB_DAYS = 34
OPENB_RUN_SECONDS_MAX = 6 * 3600.0  # longer ones are cut: one in ten
# Types that together take every shape of the list, with its 6 to 20 CPUs a GPU, 1 to 8 GPUs a pod, or none.
OPENB_TYPES = tuple(
    entry
    for entry in CATALOGUE
    if entry.name.partition(".")[0] in ("g4dn", "g5", "g6", "m5") and entry.name not in ("g4dn.2xlarge", "g5.2xlarge")
)
_OPENB_PRIORITIES = {"LS": "high", "Guaranteed": "high", "Burstable": "medium", "BE": "low"}


def openb(folder: Path, seed: int, hours: float) -> Scene:
    """Return the pods of a window that begins on a day the seed chooses; each is a job of one member.

    Latency-sensitive pods (`LS`, `Guaranteed`) are of high priority and never on spot; best-effort ones (`BE`) are low.
    Shares of a GPU are rounded up to one; no GPU model is asked for, as the list names none.
    """
    path = find_pod_list(str(folder / "openb-gpu-2023"))
    from_seconds = (OPENB_FIRST_DAY + (7 * seed) % OPENB_DAYS) * DAY_SECONDS
    pods = read_pods_between(path, from_seconds, from_seconds + hours * 3600.0)
    return Scene(
        name="openb",
        told=f"openb pod list: {len(pods)} pods created in {hours:g} h from day {from_seconds / DAY_SECONDS:g} on, "
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


# ---- philly: how many nodes were busy, minute by minute

PHILLY_NODES_A_JOB = 10
PHILLY_SLACK_NODES = 6  # the trace moves by a few nodes each minute; a job begins or ends when it has moved by more
PHILLY_DAYS = 72


def philly(folder: Path, seed: int, hours: float) -> Scene:
    """Return work that is as much as the busy nodes of a window: one job of four GPUs for each ten of them.

    When the trace falls, the job that began first ends. All jobs train, and may run on spot.
    """
    path = folder / "philly" / "philly_node_sequence.csv.gz"
    first = (7 * seed) % PHILLY_DAYS * 1440
    active = _busy_nodes(path)[first : first + int(hours * 60) + 1]
    if not active:
        raise ConfigError(str(path), [f"has no minute {first}"])
    spans = _spans(active)
    return Scene(
        name="philly",
        told=f"Philly, {hours:g} h from minute {first} on: a job of four GPUs for {PHILLY_NODES_A_JOB} busy nodes each",
        hours=hours,
        seed=seed,
        arrivals=tuple(
            Arrival(at_seconds=from_minute * 60.0, request=_four_gpus(number, (to_minute - from_minute) * 60.0))
            for number, (from_minute, to_minute) in enumerate(spans)
        ),
        offers=offers_of(TYPES),
    )


def _busy_nodes(path: Path) -> list[int]:
    return [int(row["active"]) for row in _rows(path)]


def _spans(active: Sequence[int]) -> list[tuple[int, int]]:
    """Return from and to of each job, in minutes: as many at a time as the trace has tens of busy nodes."""
    began: list[int] = []
    spans: list[tuple[int, int]] = []
    for minute, count in enumerate(active):
        wanted = count / PHILLY_NODES_A_JOB
        slack = PHILLY_SLACK_NODES / PHILLY_NODES_A_JOB
        while len(began) + slack < wanted:
            began.append(minute)
        while began and began[0] < minute and len(began) - slack > wanted:
            spans.append((began.pop(0), minute))
    return sorted([*spans, *((from_minute, len(active)) for from_minute in began)])


def _four_gpus(number: int, run_seconds: float) -> JobRequested:
    name = f"philly-{number:04d}"
    return JobRequested(
        job_name=name,
        job_id=JobId(name),
        project_id="philly",
        gpu_requirements=GpuRequirements(gpu_count=4),
        container=ContainerRequest(image="work:1"),
        resources=ResourceRequest(cpu="16", memory="64Gi"),
        workload_type=SAVING_WORK,
        max_duration_hours=HOURS_MAX,
        run_seconds=run_seconds,
    )


# ---- bamboo: how many spot machines a fleet could hold

BAMBOO_ZONES = {
    ZONES[0]: ("aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv", 120.0),
    ZONES[1]: ("v100x1-east1c.txt", 30.0),
    ZONES[2]: ("a100x1-east1b.txt", 30.0),
}  # by zone: the trace that it follows, and the notice that cloud gives
BAMBOO_STEP_SECONDS = 300.0  # polls within it are one: several interleave in the files


def bamboo(folder: Path, seed: int, hours: float) -> Scene:
    """Return steady work that may all run on spot, in three zones of which each follows one recorded spot fleet.

    Where the recorded fleet falls by a share, each spot machine of the zone is taken by that chance; from then on the
    zone sells none until the recorded fleet grows again.
    """
    reclaims: list[Reclaim] = []
    shortages: list[Shortage] = []
    for zone, (name, notice_seconds) in BAMBOO_ZONES.items():
        counts = fleet_counts(folder / "bamboo-spot" / name)
        lasts = len(counts) * BAMBOO_STEP_SECONDS
        room_seconds = max(BAMBOO_STEP_SECONDS, lasts - hours * 3600.0)
        offset = int(((seed - 1) * hours * 3600.0) % room_seconds // BAMBOO_STEP_SECONDS)
        window = counts[offset : offset + int(hours * 3600.0 // BAMBOO_STEP_SECONDS)]
        reclaims += _falls(window, zone, notice_seconds)
        shortages += _shortages(window, zone)
    return Scene(
        name="bamboo",
        told=f"{JOBS_PER_HOUR:g} jobs an hour that may run on spot, in zones that follow three recorded spot fleets",
        hours=hours,
        seed=seed,
        arrivals=preemptible_jobs(random.Random(f"bamboo/{seed}"), hours, JOBS_PER_HOUR),
        offers=offers_of(TYPES),
        reclaims=tuple(sorted(reclaims, key=lambda one: (one.at_seconds, one.zone))),
        shortages=tuple(shortages),
    )


# S80: every 15 minutes; writes of 5 to 90 s, in which small and large models differ.
CHECKPOINTS = Saving(
    every_seconds=900.0, write_seconds_min=5.0, write_seconds_max=90.0, answers=True, saves_at_end=False
)


def bamboo_checkpoints(folder: Path, seed: int, hours: float) -> Scene:
    """Return the spot fleets of `bamboo` with work that all saves itself, and runs as long as pods of openb do."""
    world = bamboo(folder, seed, hours)
    pods = read_pods_between(find_pod_list(str(folder / "openb-gpu-2023")), 0.0, math.inf)
    lengths = [min(pod.duration_seconds, OPENB_RUN_SECONDS_MAX) for pod in pods if pod.gpu_count > 0]
    chance = random.Random(f"bamboo-checkpoints/{seed}")
    return replace(
        world,
        name="bamboo-checkpoints",
        told=f"{world.told}; all of them train for as long as openb's pods ran (at most "
        f"{OPENB_RUN_SECONDS_MAX / 3600:g} h) and save every {CHECKPOINTS.every_seconds / 60:g} min, which takes "
        f"{CHECKPOINTS.write_seconds_min:g} to {CHECKPOINTS.write_seconds_max:g} s",
        arrivals=tuple(
            replace(
                one,
                request=replace(one.request, workload_type=SAVING_WORK, run_seconds=round(chance.choice(lengths), 1)),
            )
            for one in world.arrivals
        ),
        saving=CHECKPOINTS,
    )


def fleet_counts(path: Path) -> list[int]:
    """Return how many machines the fleet of a file had, for each BAMBOO_STEP_SECONDS from its beginning on.

    Two forms: `hours,count`, and `date, time, count`. Raises ConfigError naming the file.
    """
    try:
        lines = [line.replace(",", " ").split() for line in path.read_text().splitlines() if line.strip()]
        if len(lines[0]) == 2:
            polls = [(float(hours) * 3600.0, int(count)) for hours, count in lines]
        else:
            told = sorted((datetime.fromisoformat(f"{day}T{time}+00:00"), int(count)) for day, time, count in lines)
            polls = [((at - told[0][0]).total_seconds(), count) for at, count in told]
    except (OSError, ValueError, IndexError) as exc:
        raise ConfigError(str(path), [f"is no list of fleet sizes: {exc}"]) from exc
    last = {int(at // BAMBOO_STEP_SECONDS): count for at, count in polls}
    counts, known = [], polls[0][1]
    for step in range(max(last) + 1):
        known = last.get(step, known)
        counts.append(known)
    return counts


def _falls(counts: Sequence[int], zone: str, notice_seconds: float) -> Iterator[Reclaim]:
    for step, (before, after) in enumerate(itertools.pairwise(counts), 1):
        if after < before:
            yield Reclaim(
                at_seconds=step * BAMBOO_STEP_SECONDS,
                zone=zone,
                ratio=round((before - after) / before, 4),
                notice_seconds=notice_seconds,
            )


def _shortages(counts: Sequence[int], zone: str) -> Iterator[Shortage]:
    began: float | None = None
    for step, (before, after) in enumerate(itertools.pairwise(counts), 1):
        at = step * BAMBOO_STEP_SECONDS
        if after < before and began is None:
            began = at
        elif after > before and began is not None:
            yield Shortage(zone=zone, from_seconds=began, to_seconds=at)
            began = None
    if began is not None:
        yield Shortage(zone=zone, from_seconds=began, to_seconds=len(counts) * BAMBOO_STEP_SECONDS)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(str(path), [f"cannot be read: {exc}"]) from exc
