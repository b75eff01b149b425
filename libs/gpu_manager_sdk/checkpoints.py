"""Checkpoints of a training process: saved atomically, verified when restored, and garbage-collected.

manager = CheckpointManager("s3://checkpoints/research", endpoint_url="http://minio:9000")
state = manager.restore(job_id)  # None: start from the beginning
manager.save(job_id, state)

`{dir}/{job_id}.ckpt` is a small manifest. It names the last versions with size and SHA-256; their data is in
`{dir}/{job_id}.ckpt.d/`. A save writes the data first and replaces the manifest last, so that a process that is killed
in between leaves the former checkpoint in force.
"""

import hashlib
import io
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import msgspec

from gpu_manager_sdk.checkpoint_storage import CHUNK_BYTES, storage_of
from gpu_manager_sdk.errors import CheckpointCorrupted, CheckpointError

# Data that no manifest names is kept this long: another process may be about to name it.
UNNAMED_SECONDS = 3600.0
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")

log = logging.getLogger("gpu_manager_sdk")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One save of a job."""

    name: str  # of its data, below `{job_id}.ckpt.d/`
    saved_at: datetime
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `{dir}/{job_id}.ckpt` holds, as JSON."""

    versions: tuple[Version, ...]  # the newest first
    format: int = 1


class CheckpointManager:
    """Checkpoints of all jobs in one place. One process of a job saves: of a gang, the one with rank 0."""

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        endpoint_url: str | None = None,
        keep_count: int = 2,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`checkpoint_dir`: a directory, or s3://BUCKET/PREFIX. `endpoint_url`: of MinIO or another server; None:
        `AWS_ENDPOINT_URL_S3`, or AWS. Credentials are found as by any program of AWS. `keep_count`: versions of each
        job, at least 1; the second one is restored if the newest is damaged."""
        if keep_count < 1:
            raise ValueError(f"keep_count is {keep_count}; keep at least 1 version")
        self._storage = storage_of(str(checkpoint_dir), endpoint_url)
        self._keep_count = keep_count
        self._now = now

    def save(self, job_id: str, state: bytes | Path) -> Version:
        """Save bytes or the content of a file, and delete versions beyond `keep_count`.

        Raises CheckpointStorageFailed; then the former checkpoint is in force.
        """
        key, saved_at = _key(job_id), self._now()
        with _opened(state) as source:
            digest, size_bytes = hashlib.sha256(), 0
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
            source.seek(0)
            version = Version(
                name=f"{saved_at:%Y%m%dT%H%M%S.%fZ}-{uuid.uuid4().hex[:8]}",
                saved_at=saved_at,
                size_bytes=size_bytes,
                sha256=digest.hexdigest(),
            )
            self._storage.write(f"{key}.d/{version.name}", source)
        former = self._manifest(key)
        versions = (version, *(() if former is None else former.versions))[: self._keep_count]
        self._storage.write(key, io.BytesIO(msgspec.json.encode(Manifest(versions=versions))))
        self._collect(key, versions)
        return version

    def restore(self, job_id: str) -> bytes | None:
        """Return the newest undamaged checkpoint; None if the job has none. Raises CheckpointCorrupted if all are
        damaged, CheckpointStorageFailed."""
        with tempfile.SpooledTemporaryFile(max_size=CHUNK_BYTES) as target:
            return target.read() if self._restore(_key(job_id), target) is not None else None

    def restore_to(self, job_id: str, path: Path) -> Version | None:
        """Write the newest undamaged checkpoint to this file, atomically; None, and no file, if the job has none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w+b") as target:
                version = self._restore(_key(job_id), target)
            if version is not None:
                Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
        return version

    def versions(self, job_id: str) -> tuple[Version, ...]:
        """Return the saves of the job that are kept, the newest first."""
        manifest = self._manifest(_key(job_id))
        return () if manifest is None else manifest.versions

    def remove(self, job_id: str) -> None:
        """Remove all checkpoints of the job, as after its end."""
        key = _key(job_id)
        self._storage.delete(key)
        for stored in list(self._storage.list(f"{key}.d/")):
            self._storage.delete(stored.name)

    def remove_older_than(self, age: timedelta) -> tuple[str, ...]:
        """Remove the checkpoints of jobs that have not saved for so long; return their ids."""
        before = self._now() - age
        modified_at: dict[str, datetime] = {}
        for stored in self._storage.list():
            name, _, is_data = stored.name.partition("/")
            suffix = ".ckpt.d" if is_data else ".ckpt"
            if name.endswith(suffix):
                job_id = name.removesuffix(suffix)
                modified_at[job_id] = max(stored.modified_at, modified_at.get(job_id, stored.modified_at))
        removed = sorted(job_id for job_id, at in modified_at.items() if at < before)
        for job_id in removed:
            self.remove(job_id)
        return tuple(removed)

    def _restore(self, key: str, target: IO[bytes]) -> Version | None:
        manifest, former = self._manifest(key), None
        # Another process may save meanwhile, and delete what the manifest named: a new manifest is tried again.
        while manifest is not None and manifest != former:
            for version in manifest.versions:
                target.seek(0)
                target.truncate()
                problem = self._problem(key, version, target)
                if problem is None:
                    target.seek(0)
                    return version
                log.warning("checkpoint %s.d/%s %s; another version is tried", key, version.name, problem)
            manifest, former = self._manifest(key), manifest
        if former is None:
            return None
        raise CheckpointCorrupted(
            f"all {len(former.versions)} checkpoints of {key} are damaged; remove them to start from the beginning"
        )

    def _problem(self, key: str, version: Version, target: IO[bytes]) -> str | None:
        """Copy a version into `target`; return what is wrong with it."""
        if not self._storage.read(f"{key}.d/{version.name}", target):
            return "is missing"
        target.seek(0)
        digest = hashlib.sha256()
        while chunk := target.read(CHUNK_BYTES):
            digest.update(chunk)
        return None if digest.hexdigest() == version.sha256 else "is damaged"

    def _manifest(self, key: str) -> Manifest | None:
        target = io.BytesIO()
        if not self._storage.read(key, target):
            return None
        try:
            return msgspec.json.decode(target.getvalue(), type=Manifest)
        except msgspec.MsgspecError as exc:
            raise CheckpointCorrupted(
                f"{key} is no manifest of checkpoints ({exc}); use another directory, or remove the file"
            ) from exc

    def _collect(self, key: str, versions: tuple[Version, ...]) -> None:
        """Delete data that the manifest does not name, unless another process may have just written it."""
        named = {f"{key}.d/{version.name}" for version in versions}
        oldest_at = min(version.saved_at for version in versions)
        before = self._now() - timedelta(seconds=UNNAMED_SECONDS)
        for stored in list(self._storage.list(f"{key}.d/")):
            saved_at = _saved_at(stored.name.rpartition("/")[2]) or stored.modified_at
            if stored.name not in named and (saved_at < oldest_at or stored.modified_at < before):
                self._storage.delete(stored.name)


def _key(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise CheckpointError(f"{job_id!r} is no id of a job; use letters, digits, '.', '_' and '-'")
    return f"{job_id}.ckpt"


def _saved_at(name: str) -> datetime | None:
    """Return when a version was saved, by its name; None for a partial file."""
    try:
        return datetime.strptime(name.partition("-")[0], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        return None


@contextmanager
def _opened(state: bytes | Path) -> Iterator[IO[bytes]]:
    if isinstance(state, Path):
        with state.open("rb") as source:
            yield source
    else:
        yield io.BytesIO(state)
