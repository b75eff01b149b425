"""Records an earlier version in the middle of a story: `python -m tests.upgrade.record`. Run with each release.

What comes of it: the streams, the store and the cluster at one moment, from which today's version has to go on.
"""

import asyncio
import io
import sqlite3
import sys
import tarfile
import tempfile
from pathlib import Path

import aiohttp
import msgspec
from nats.aio.client import Client
from tests.e2e.test_story import has, request
from tests.support.running import Running, followed, started
from tests.upgrade import EARLIER, PROCESSES, RECORDED, unpacked
from tests.upgrade.streams import exported
from tests.upgrade.world import Saved

from gpu_autoscaler.bus.streams import DEAD
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobStarted
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.simcluster.cloud_http import TrueInstance
from gpu_autoscaler.simcluster.kinds import JOBS, LEASES, NAMESPACES, NODES, PODS, PRIORITY_CLASSES, SERVICES, Kind
from gpu_autoscaler_services.demo.subscriber import STREAMS

_TABLES: tuple[Kind, ...] = (NAMESPACES, PRIORITY_CLASSES, NODES, LEASES, SERVICES, JOBS, PODS)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to go on from it."""

    version: str  # whose it is: the name of the archive with its code
    clock: str  # of the cluster
    at: str  # cluster time, RFC 3339


async def story(cluster: Running) -> None:
    """Jobs that are over, canceled, running, and one not yet read; a reclaimed node; costs."""
    player = cluster.player
    await player.submit(request("done", run_seconds=20.0), "nats")
    await player.submit(request("cancelled", run_seconds=9000.0), "nats")
    await player.submit(request("gang", members=2, run_seconds=900.0), "nats")
    await cluster.until(lambda record: has(record, JobFinished, job_id="done"), "a job is over", 120.0)
    await cluster.until(lambda record: has(record, JobStarted, job_id="cancelled"), "a job runs", 120.0)
    await cluster.until(lambda record: has(record, JobStarted, job_id="gang"), "a gang runs", 120.0)
    await player._publish(JobCancelRequested(job_id=JobId("cancelled"), requested_by="a test"))
    await cluster.until(lambda record: has(record, JobFinished, job_id="cancelled"), "it is cancelled", 60.0)
    starts = cluster.record.count(JobStarted)
    assert await cluster.world.send_notice(120.0) is not None
    await cluster.until(lambda record: record.count(ScalingNodeTerminated) >= 1, "the cloud took a node", 120.0)
    await cluster.until(lambda record: record.count(JobStarted) > starts, "the gang runs again", 120.0)
    async with asyncio.timeout(120):
        while {one.instance.state for one in await _instances(cluster)} & {"pending", "terminating"}:
            await asyncio.sleep(0.5)  # machines that boot would have to boot again
    cluster.freeze("scheduler")
    await player.submit(request("unread", run_seconds=30.0), "nats")


async def _instances(cluster: Running) -> tuple[TrueInstance, ...]:
    body = await cluster.world._call("GET", "/admin/instances")
    return msgspec.convert(body, tuple[TrueInstance, ...])


async def world(cluster: Running) -> Saved:
    """The cluster as it is."""
    objects = {}
    async with aiohttp.ClientSession() as session:
        for kind in _TABLES:
            root = f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"
            async with session.get(f"{cluster.system.simcluster_url}/{root}/{kind.plural}") as answer:
                objects[kind.table] = (await answer.json())["items"]
    return Saved(objects=objects, instances=await _instances(cluster))


async def record(path: Path) -> None:
    """Play the story, stop in the middle, and keep what is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = dict.fromkeys(PROCESSES, unpacked(folder / "earlier"))
        async with started(folder / "system", code=code) as system, followed(system) as cluster:
            await story(cluster)
            await asyncio.gather(*(system.children[each].stop() for each in PROCESSES))
            connection = Client()
            await connection.connect(system.nats_url)
            kept = await exported(connection, (*STREAMS, DEAD))
            await connection.close()
            saved, at = await world(cluster), cluster.clock.now()
            about = About(version=EARLIER.name, clock=cluster.clock.to_text(), at=at.isoformat())
        with tarfile.open(path, "w:xz") as archive:
            for entry, content in (
                ("about.json", msgspec.json.encode(about)),
                ("configs.json", msgspec.json.encode(kept.configs)),
                ("streams.jsonl", b"".join(msgspec.json.encode(line) + b"\n" for line in kept.lines)),
                ("world.json", msgspec.json.encode(saved)),
                ("store.db", compact_store(folder / "system" / "store.db")),
            ):
                member = tarfile.TarInfo(entry)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def compact_store(path: Path) -> bytes:
    """The store with its last snapshot of each service alone: the older ones only make it large."""
    with sqlite3.connect(path, isolation_level=None) as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.execute("PRAGMA journal_mode=DELETE")
        store.execute("DELETE FROM snapshots WHERE number NOT IN (SELECT max(number) FROM snapshots GROUP BY service)")
        store.execute("VACUUM")
    return path.read_bytes()


def pack_code(path: Path) -> None:
    """Pack today's services and their libraries, without simulators and texts."""
    root = Path(__file__).resolve().parents[2]
    left_out = {
        "sim",
        "simcluster",
        "simcloud",
        "simulate.py",
        "simulation.py",
        "score.py",
        "score_cases.py",
        "score_page.py",
    }

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        is_left_out = "__pycache__" in parts or (len(parts) > 1 and parts[1] in left_out) or parts[-1] == "README.md"
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        return None if is_left_out else member

    with tarfile.open(path, "w:xz") as archive:
        for package in (root / "libs" / "gpu_autoscaler", root / "services" / "gpu_autoscaler_services"):
            archive.add(package, arcname=package.name, filter=kept)


def pack_chart(path: Path) -> None:
    """Pack today's chart as `helm package` does."""
    chart = Path(__file__).resolve().parents[2] / "deploy" / "charts" / "gpu-autoscaler"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(chart, arcname=chart.name)


if __name__ == "__main__":
    pack_code(EARLIER)
    pack_chart(EARLIER.with_name(EARLIER.name.replace(".tar.xz", "-chart.tgz")))
    asyncio.run(record(RECORDED))
    sys.stdout.write(f"{RECORDED} ({RECORDED.stat().st_size:,} bytes)\n")
