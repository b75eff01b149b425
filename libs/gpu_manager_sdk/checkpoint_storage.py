"""Where checkpoints are kept: a directory, or a bucket of S3 or MinIO. A file is there as a whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

import msgspec

from gpu_manager_sdk.errors import CheckpointStorageFailed

CHUNK_BYTES = 8 * 1024 * 1024
_PARTIAL = ".partial-"  # begins the name of a file that is being written


class Stored(msgspec.Struct, frozen=True):
    """A stored file."""

    name: str  # relative to the directory
    modified_at: datetime


class Storage(Protocol):
    """Files of one directory. Every method raises CheckpointStorageFailed."""

    def write(self, name: str, source: IO[bytes]) -> None:
        """Write the file, atomically: readers see the former file, or all of the new one."""

    def read(self, name: str, target: IO[bytes]) -> bool:
        """Copy the file into `target`; False if there is none."""

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """Yield the files whose names begin so, partial ones included."""

    def delete(self, name: str) -> None:
        """Delete the file; one that does not exist is deleted already."""


class DirectoryStorage:
    """A directory of this machine or of a volume."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, source: IO[bytes]) -> None:
        """Write beside the file, flush to the disk, then rename."""
        path = self._directory / name
        with _explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as target:
                    shutil.copyfileobj(source, target, CHUNK_BYTES)
                    target.flush()
                    os.fsync(target.fileno())
                Path(partial).replace(path)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            _flush(path.parent)

    def read(self, name: str, target: IO[bytes]) -> bool:
        """Copy the file into `target`; False if there is none."""
        path = self._directory / name
        with _explained("read", path):
            try:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target, CHUNK_BYTES)
            except FileNotFoundError:
                return False
        return True

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """Yield the files whose names begin so."""
        with _explained("list", self._directory):
            for path in sorted(self._directory.rglob("*")):
                name = path.relative_to(self._directory).as_posix()
                if name.startswith(prefix) and path.is_file():
                    yield Stored(name, datetime.fromtimestamp(path.stat().st_mtime, UTC))

    def delete(self, name: str) -> None:
        """Delete the file, and its folder if that is empty."""
        path = self._directory / name
        with _explained("delete", path):
            path.unlink(missing_ok=True)
            if path.parent != self._directory and path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()


class S3Storage:
    """A prefix of a bucket. An object is replaced when its upload, also one in several parts, is complete.

    Amazon Simple Storage Service User Guide, "Amazon S3 data consistency model", read 2026-11-24.
    """

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None) -> None:
        try:
            import boto3  # noqa: PLC0415 - an extra
            from boto3.s3.transfer import TransferConfig  # noqa: PLC0415 - as boto3
            from botocore.config import Config  # noqa: PLC0415 - as boto3
        except ImportError as exc:
            raise CheckpointStorageFailed(
                "boto3 is not installed; install it with: pip install 'gpu-manager-sdk[s3]'"
            ) from exc
        config = Config(connect_timeout=10.0, read_timeout=60.0, retries={"total_max_attempts": 5, "mode": "standard"})
        with _explained("open", f"s3://{bucket}"):
            self._client: Any = boto3.client("s3", endpoint_url=endpoint_url, config=config)
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        # One part at a time: a training process has little memory and processor time to spare.
        self._transfer = TransferConfig(multipart_chunksize=CHUNK_BYTES, use_threads=False)

    def write(self, name: str, source: IO[bytes]) -> None:
        """Upload the object, in parts where it is large; S3 verifies a checksum of each."""
        with _explained("write", self._url(name)):
            self._client.upload_fileobj(
                source,
                self._bucket,
                self._prefix + name,
                ExtraArgs={"ChecksumAlgorithm": "SHA256"},
                Config=self._transfer,
            )

    def read(self, name: str, target: IO[bytes]) -> bool:
        """Copy the object into `target`; False if there is none."""
        with _explained("read", self._url(name)):
            try:
                body = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]
            except self._client.exceptions.NoSuchKey:
                return False
            with body:
                target.writelines(body.iter_chunks(CHUNK_BYTES))
        return True

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """Yield the objects whose names begin so."""
        with _explained("list", self._url(prefix)):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield Stored(entry["Key"].removeprefix(self._prefix), entry["LastModified"])

    def delete(self, name: str) -> None:
        """Delete the object."""
        with _explained("delete", self._url(name)):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def _url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"


def storage_of(location: str, endpoint_url: str | None) -> Storage:
    """Return the storage of `s3://BUCKET/PREFIX`, or of a directory."""
    parts = urlsplit(location)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise CheckpointStorageFailed(f"{location!r} names no bucket; use s3://BUCKET/PREFIX")
        return S3Storage(parts.netloc, parts.path.strip("/"), endpoint_url)
    if "://" in location:
        raise CheckpointStorageFailed(f"{location!r} is no known storage; use s3://BUCKET/PREFIX or a directory")
    return DirectoryStorage(Path(location))


def _flush(directory: Path) -> None:
    """Flush the directory's entries to the disk, so that a rename survives a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(verb: str, what: object) -> Iterator[None]:
    """Raise failures of the storage as CheckpointStorageFailed, with the next step."""
    try:
        yield
    except OSError as exc:
        step = "check that the volume is mounted, writable and not full"
        raise CheckpointStorageFailed(f"checkpoint storage failed to {verb} {what}: {exc}; {step}") from exc
    except Exception as exc:
        # boto3 has no common base class that can be named without importing it.
        if not type(exc).__module__.startswith(("boto3.", "botocore.", "s3transfer.", "urllib3.")):
            raise
        step = "check endpoint, bucket, credentials and their rights"
        raise CheckpointStorageFailed(f"checkpoint storage failed to {verb} {what}: {exc}; {step}") from exc
