"""`CheckpointManager`: in a directory, and in S3 as moto serves it."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.aws import moto_or_skip

from gpu_manager_sdk import CheckpointManager
from gpu_manager_sdk.checkpoints import UNNAMED_SECONDS
from gpu_manager_sdk.errors import CheckpointCorrupted, CheckpointError, CheckpointStorageFailed

LARGE_BYTES = 20 * 1024 * 1024  # three parts of an upload
# Saves the file of its first argument, and ends where `os.fsync` is called for the count in the third one.
SAVE_AND_DIE = """
import os, pathlib, signal, sys
from gpu_manager_sdk import CheckpointManager
left = int(sys.argv[3])
def fsync(descriptor, flush=os.fsync):
    global left
    left -= 1
    flush(descriptor) if left else os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
CheckpointManager(sys.argv[2]).save("train", pathlib.Path(sys.argv[1]))
"""
SAVE = """
import pathlib, sys
from gpu_manager_sdk import CheckpointManager
CheckpointManager(sys.argv[2], endpoint_url=sys.argv[3]).save("train", pathlib.Path(sys.argv[1]))
"""


class Clock:
    """A clock that only advances by hand."""

    def __init__(self) -> None:
        self.at = datetime.now(UTC)

    def now(self) -> datetime:
        """A little later with each look."""
        self.at += timedelta(seconds=1)
        return self.at


class Bucket:
    """An empty bucket, and what happens to requests."""

    def __init__(self, url: str, client: Any) -> None:  # noqa: ANN401 - boto3 has no types
        self.url = url
        self.client = client
        self.location = "s3://checkpoints/research"
        self.on_request: Callable[[str, str], str | None] = lambda _method, _path: None  # a status, or None

    def manager(self, **changes: Any) -> CheckpointManager:  # noqa: ANN401 - settings of the manager
        """A manager that saves here."""
        return CheckpointManager(self.location, endpoint_url=self.url, **changes)

    def names(self) -> list[str]:
        """Keys of all objects."""
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket="checkpoints").get("Contents", ())]


@contextmanager
def served(bucket_of: Callable[[str], Bucket]) -> Iterator[Bucket]:
    """Serve S3 on loopback until the block ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415 - slow
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415 - of the same extra

    app = DomainDispatcherApplication(create_backend_app)
    made: list[Bucket] = []

    def answer(environ: dict[str, Any], start: Any) -> Any:  # noqa: ANN401 - WSGI
        status = made[0].on_request(environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        if status is None:
            return app(environ, start)
        start(status, [("Content-Length", "0")])
        return []

    quiet: Any = type("Quiet", (WSGIRequestHandler,), {"log_request": lambda *_, **__: None})
    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    made.append(bucket_of(f"http://127.0.0.1:{server.server_port}"))
    try:
        made[0].client.create_bucket(Bucket="checkpoints")
        yield made[0]
    finally:
        server.shutdown()
        thread.join(timeout=5.0)
        server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket."""
    moto_or_skip()
    import boto3  # noqa: PLC0415 - an extra
    import moto.backends  # noqa: PLC0415 - an extra

    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with served(lambda url: Bucket(url, boto3.client("s3", endpoint_url=url))) as bucket:
        yield bucket
    moto.backends.get_backend("s3").reset()


@pytest.fixture(params=["directory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., CheckpointManager]:
    """Return how a manager is made, in a directory and in S3."""
    if request.param == "s3":
        made: Bucket = request.getfixturevalue("bucket")
        return made.manager
    return lambda **changes: CheckpointManager(tmp_path / "checkpoints", **changes)


Make = Callable[..., CheckpointManager]


def test_what_was_saved_is_restored(make: Make, tmp_path: Path) -> None:
    """Bytes and files; another manager, as of the next attempt, finds them."""
    source, target = tmp_path / "state.pt", tmp_path / "deep" / "restored.pt"
    source.write_bytes(os.urandom(LARGE_BYTES))

    assert make().restore("train") is None
    assert make().restore_to("train", target) is None
    assert list(target.parent.iterdir()) == []
    saved = make().save("train", source)
    assert saved.size_bytes == LARGE_BYTES
    assert make().restore_to("train", target) == saved
    assert target.read_bytes() == source.read_bytes()
    make().save("train", b"later")
    make().save("other", b"")
    assert (make().restore("train"), make().restore("other")) == (b"later", b"")


def test_the_manifest_has_the_name_of_the_job(tmp_path: Path, bucket: Bucket) -> None:
    """`{dir}/{job_id}.ckpt`, in both."""
    CheckpointManager(tmp_path).save("train", b"1")
    bucket.manager().save("train", b"1")

    assert (tmp_path / "train.ckpt").is_file()
    assert "research/train.ckpt" in bucket.names()


def test_old_versions_are_collected(make: Make) -> None:
    """As many as are kept, the newest first; data without a manifest goes with them."""
    manager = make(keep_count=2, now=Clock().now)
    saved = [manager.save("train", bytes([number])) for number in range(4)]

    assert manager.versions("train") == (saved[3], saved[2])
    assert {stored.name for stored in manager._storage.list()} == {
        "train.ckpt",
        *(f"train.ckpt.d/{version.name}" for version in saved[2:]),
    }


def test_finished_jobs_are_removed(make: Make) -> None:
    """One by name, or all that have not saved for a time; others stay."""
    clock = Clock()
    manager = make(now=clock.now)
    for job_id in ("a", "b", "c.ckpt"):
        manager.save(job_id, b"1")
    manager.remove("a")
    manager.remove("a")
    assert (manager.restore("a"), manager.restore("b")) == (None, b"1")
    assert manager.remove_older_than(timedelta(days=1)) == ()
    clock.at += timedelta(days=2)
    assert manager.remove_older_than(timedelta(days=1)) == ("b", "c.ckpt")
    assert list(manager._storage.list()) == []


def damage_newest(manager: CheckpointManager, content: bytes | None) -> None:
    """Replace the data of the newest version of `train`; None: delete it."""
    name = f"train.ckpt.d/{manager.versions('train')[0].name}"
    storage = manager._storage
    if content is None:
        storage.delete(name)
    else:
        storage.write(name, io.BytesIO(content))


@pytest.mark.parametrize("content", [b"damaged", b"new", b"", None], ids=["changed", "cut", "empty", "missing"])
def test_a_damaged_version_is_skipped(make: Make, content: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """The one before is restored, and the log says so; without one it is an error, never wrong data."""
    manager = make()
    manager.save("train", b"old")
    manager.save("train", b"newest")
    damage_newest(manager, content)

    assert manager.restore("train") == b"old"
    assert "another version is tried" in caplog.text
    alone = make(keep_count=1)
    alone.save("train", b"newest")
    damage_newest(alone, content)
    with pytest.raises(CheckpointCorrupted, match=r"all 1 checkpoints of train\.ckpt are damaged; remove them"):
        alone.restore("train")


def test_a_foreign_file_is_no_manifest(tmp_path: Path) -> None:
    """It is not overwritten either."""
    (tmp_path / "train.ckpt").write_bytes(b"\x80\x02pickle")
    for act in (
        lambda: CheckpointManager(tmp_path).restore("train"),
        lambda: CheckpointManager(tmp_path).save("train", b"1"),
    ):
        with pytest.raises(CheckpointCorrupted, match="is no manifest of checkpoints"):
            act()
    assert (tmp_path / "train.ckpt").read_bytes() == b"\x80\x02pickle"


@pytest.mark.parametrize("flushes_count", [1, 2, 3, 4])
def test_a_process_killed_while_it_saves_leaves_the_former_checkpoint(tmp_path: Path, flushes_count: int) -> None:
    """At each flush: of the data, its folder, the manifest and the directory. What it left is collected later."""
    clock = Clock()
    manager = CheckpointManager(tmp_path / "checkpoints", keep_count=1, now=clock.now)
    manager.save("train", b"former")
    source = tmp_path / "state.pt"
    source.write_bytes(b"later")
    command = [sys.executable, "-c", SAVE_AND_DIE, str(source), str(tmp_path / "checkpoints"), str(flushes_count)]
    killed = subprocess.run(command, check=False, timeout=60)

    assert killed.returncode == -signal.SIGKILL
    assert manager.restore("train") == (b"later" if flushes_count == 4 else b"former")  # renamed before the last flush
    clock.at += timedelta(seconds=UNNAMED_SECONDS + 60)
    manager.save("train", b"last")
    data = list((tmp_path / "checkpoints" / "train.ckpt.d").iterdir())
    assert [path.read_bytes() for path in data] == [b"last"]


def test_an_upload_that_is_killed_leaves_the_former_checkpoint(tmp_path: Path, bucket: Bucket) -> None:
    """Between two parts, and between data and manifest."""
    manager = bucket.manager()
    manager.save("train", b"former")
    source = tmp_path / "state.pt"
    source.write_bytes(os.urandom(LARGE_BYTES))
    for point in ("partNumber=2", "train.ckpt?"):
        command = [sys.executable, "-c", SAVE, str(source), bucket.location, bucket.url]
        process = subprocess.Popen(command)

        def kill(method: str, path: str, point: str = point, process: subprocess.Popen[bytes] = process) -> str | None:
            if method != "PUT" or point not in path:
                return None
            process.kill()
            return "503 Slow Down"

        bucket.on_request = kill
        assert process.wait(timeout=60) == -signal.SIGKILL
        bucket.on_request = lambda _method, _path: None
        assert manager.restore("train") == b"former"


def test_a_storage_that_fails_is_an_error_with_a_next_step(tmp_path: Path, bucket: Bucket) -> None:
    """Short failures are retried; lasting ones raise, and the former checkpoint is in force."""
    manager = bucket.manager()
    manager.save("train", b"former")
    refused: list[str] = []

    def refuse(method: str, path: str) -> str | None:
        if method == "PUT" and len(refused) < 2:
            refused.append(path)
            return "503 Slow Down"
        return None

    bucket.on_request = refuse
    manager.save("train", b"later")
    assert len(refused) == 2
    bucket.on_request = lambda method, _path: "403 Forbidden" if method == "PUT" else None
    with pytest.raises(CheckpointStorageFailed, match="check endpoint, bucket, credentials"):
        manager.save("train", b"never")
    assert manager.restore("train") == b"later"
    bucket.on_request = lambda _method, _path: None
    missing = CheckpointManager("s3://nowhere", endpoint_url=bucket.url)
    with pytest.raises(CheckpointStorageFailed, match="NoSuchBucket"):
        missing.save("train", b"1")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointStorageFailed, match="check that the volume is mounted"):
        CheckpointManager(tmp_path / "file").save("train", b"1")


def test_settings_and_ids_are_checked(tmp_path: Path) -> None:
    """An id is the name of a file: nothing leaves the directory."""
    for job_id in ("", "../train", "a/b", ".hidden", "a" * 300):
        with pytest.raises(CheckpointError, match="is no id of a job"):
            CheckpointManager(tmp_path).save(job_id, b"1")
    for location in ("s3:///prefix", "gs://bucket"):
        with pytest.raises(CheckpointStorageFailed, match="use s3://BUCKET/PREFIX"):
            CheckpointManager(location)
    with pytest.raises(ValueError, match="keep at least 1"):
        CheckpointManager(tmp_path, keep_count=0)
    assert list(tmp_path.iterdir()) == []
