"""A next release: the current code in another folder, with a planted change of each kind that a migration applies."""

import shutil
from pathlib import Path

from gpu_autoscaler.store.schema import migrations

ROOT = Path(__file__).resolve().parents[2]

# Ages, sizes and descriptions of streams; settings of every consumer.
_STREAMS = """

STREAMS = tuple(
    msgspec.structs.replace(
        spec,
        description=spec.description + ", longer",
        max_age_seconds=spec.max_age_seconds + DAY_SECONDS,
        max_bytes=2 * spec.max_bytes,
        duplicate_window_seconds=spec.duplicate_window_seconds + 60,
    )
    for spec in STREAMS
)
_config = ConsumerSpec.config
ConsumerSpec.config = lambda spec: {**_config(spec), "ack_wait": 6 * NANOSECONDS, "max_deliver": 30_000}
"""
# The scheduler consumes one more fact, for which it does nothing.
_SCHEDULER = """

from gpu_autoscaler.events.job import JobStarted

Scheduler.consumes = (*Scheduler.consumes, JobStarted)
_on_fact = Scheduler.on_fact


async def _with_starts(self, recorded):
    return [] if isinstance(recorded.fact, JobStarted) else await _on_fact(self, recorded)


Scheduler.on_fact = _with_starts
"""
_MIGRATION = "ALTER TABLE jobs ADD COLUMN note TEXT;\nCREATE INDEX jobs_by_note ON jobs (note);\n"


def next_release(folder: Path) -> Path:
    """Write the code of the next release; the folder is a PYTHONPATH."""
    for package in ("libs/gpu_autoscaler", "services/gpu_autoscaler_services"):
        shutil.copytree(ROOT / package, folder / Path(package).name)  # with compiled files
    with (folder / "gpu_autoscaler/bus/streams.py").open("a") as module:
        module.write(_STREAMS)
    with (folder / "gpu_autoscaler_services/scheduler/service.py").open("a") as module:
        module.write(_SCHEDULER)
    for database in ("sqlite", "postgres"):
        number = migrations(database)[-1][0] + 1
        (folder / f"gpu_autoscaler/store/migrations/{database}/{number:04}_note.sql").write_text(_MIGRATION)
    return folder
