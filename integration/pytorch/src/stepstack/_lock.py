"""One process at a time saves into a folder. The lock of a process that has ended, however it did, is free."""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows there is none; the folder is one run's own there
    fcntl = None  # type: ignore[assignment]

_TAKEN = (errno.EACCES, errno.EAGAIN)


class Lock:
    """A POSIX record lock on the file `.saving` of a folder, which network file systems know too.

    Processes forked meanwhile don't inherit it. Where a file system has no locks, there is none.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def take(self, folder: Path) -> None:
        """ValueError where another process has it."""
        path = folder / ".saving"
        while self._path is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if fcntl is not None:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(descriptor, 1000).decode(errors="replace")
                if error.errno in _TAKEN:
                    os.close(descriptor)
                    raise ValueError(
                        f"{folder}: another process is saving into it at this moment ({holder or 'unknown'}): one run "
                        "has one folder. If it is this run, started earlier and not ended, end it"
                    ) from None
            if _is_at(descriptor, path):
                self._path, self._descriptor = path, descriptor
            else:  # the one before has removed its file while we waited for it
                os.close(descriptor)
        with suppress(OSError):  # on a full disk the lock does without its owner's name
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Let others take it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._path = None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
