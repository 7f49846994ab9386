"""The directory beside the target in which a checkpoint is written: locked, resumable, renamed when complete."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from redraft.config import read_json
from redraft.errors import CheckpointError, UsageError
from redraft.files import write_text
from redraft.store.tensorfile import file_sha256

PROGRESS = "progress.json"
LOCK = "lock"


def partial_path(dst: str | Path) -> Path:
    """Where unfinished work for the target `dst` is kept."""
    return _beside(Path(dst).expanduser().resolve(), "partial")


def _beside(target: Path, ending: str) -> Path:
    return target.parent / f".{target.name}.{ending}"


def restore_replaced(target: Path) -> None:
    """Put back what `publish` had moved aside when the process died between its two renames."""
    replaced = _beside(target, "replaced")
    if replaced.is_dir() and not target.exists():
        replaced.rename(target)


class WorkDir:
    """Unfinished work for one target: files of the given `sizes`, and `spare` bytes beside them.

    `records` describes the files that are finished: {"bytes", "sha256", ...} by file name. The fingerprint is of what
    decides their content. Failures of the file system become one CheckpointError with the numbers.
    """

    def __init__(self, target: Path, fingerprint: str, sizes: dict[str, int], spare: int):
        self.target, self.path = target, partial_path(target)
        self.records: dict[str, dict[str, Any]] = {}
        self._fingerprint, self._sizes, self._spare = fingerprint, sizes, spare

    @contextmanager
    def resumed(self) -> Iterator[Self]:
        """Hold a lock on it. It keeps what an earlier run with the same fingerprint finished, and nothing else.

        What a failure leaves half-written is removed.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("w")
        with lock:
            try:
                # The lock ends with the process, however it ends: a killed one leaves none behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{self.path}: another process is writing the same target") from None
            self._resume()
            try:
                if shutil.disk_usage(self.path).free < self._need():
                    raise self._full()
                yield self
            except BaseException:
                self._discard_unfinished()
                raise

    def _discard_unfinished(self) -> None:
        """Remove half-written files, which may be what fills the disk, and an empty directory."""
        for entry in self._strangers():
            entry.unlink(missing_ok=True)
        if not self.records:
            shutil.rmtree(self.path, ignore_errors=True)

    def _strangers(self) -> list[Path]:
        """Entries that are neither recorded nor this class's own."""
        if not self.path.is_dir():
            return []
        return sorted(p for p in self.path.iterdir() if p.name not in self.records and p.name not in (PROGRESS, LOCK))

    def _resume(self) -> None:
        if (self.path / PROGRESS).exists():
            self.records = self._usable_records()
        elif strangers := [p for p in self._strangers() if not p.name.startswith(f".{PROGRESS}.")]:  # cut short itself
            raise CheckpointError(f"{strangers[0]}: not written by Redraft; move {self.path.name} out of the way")
        with self.writing():
            for entry in self._strangers():
                entry.unlink()
            self._save(self.records)

    def _usable_records(self) -> dict[str, dict[str, Any]]:
        try:
            saved = read_json(self.path / PROGRESS)
            if saved["fingerprint"] != self._fingerprint:
                return {}
            return {file: r for file, r in saved["files"].items() if file in self._sizes and self._intact(file, r)}
        except (CheckpointError, KeyError, TypeError, AttributeError):
            return {}  # an unreadable record is no record

    def _intact(self, file: str, record: dict[str, Any]) -> bool:
        path = self.path / file
        return path.is_file() and path.stat().st_size == record["bytes"] and file_sha256(path) == record["sha256"]

    def record(self, file: str, facts: dict[str, Any]) -> None:
        """Mark a written file as finished, after it has reached the disk."""
        path = self.path / file
        with self.writing():
            shutil.copymode(self.path / PROGRESS, path)  # safetensors lets only the owner read what it writes
            _sync(path)
            facts = {"bytes": path.stat().st_size, "sha256": file_sha256(path), **facts}
            self._save({**self.records, file: facts})

    def _save(self, records: dict[str, dict[str, Any]]) -> None:
        write_text(self.path / PROGRESS, json_text({"fingerprint": self._fingerprint, "files": records}))
        self.records = records

    def _need(self) -> int:
        """Bytes that are still to be written."""
        return self._spare + sum(size for file, size in self._sizes.items() if file not in self.records)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure of the file system inside the block into one CheckpointError."""
        try:
            yield
        except (OSError, SafetensorError) as e:
            if _errno(e) in (errno.ENOSPC, errno.EDQUOT):
                raise self._full() from e
            reason = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else e
            raise CheckpointError(f"{self.target}: cannot be written ({reason}); choose another place") from e

    def _full(self) -> CheckpointError:
        free = shutil.disk_usage(self.path).free
        kept = f"; {len(self.records)} finished files are kept in {self.path.name}" if self.records else ""
        return CheckpointError(
            f"{self.target}: the disk is too small: {self._need():,} more bytes are needed, {free:,} are free{kept}; "
            "make room and run the same again"
        )

    def publish(self) -> None:
        """Give the directory its final name, in place of what has that name now."""
        replaced = _beside(self.target, "replaced")
        with self.writing():
            _sync(self.path)
            if replaced.exists():
                shutil.rmtree(replaced)
            if self.target.exists():
                self.target.rename(replaced)
            try:
                self.path.rename(self.target)
            except BaseException:
                restore_replaced(self.target)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
            _sync(self.target.parent)
            for name in (PROGRESS, LOCK):
                (self.target / name).unlink()


def json_text(content: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _errno(error: OSError | SafetensorError) -> int | None:
    """The errno; a SafetensorError carries it only as text, whose wording depends on the version."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"(?:os error |code: )(\d+)", str(error))
    return int(found[1]) if found else None
