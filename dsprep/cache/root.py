"""The directory with all copies: which one that is, and whose copies count.

What a copy holds is given out as the dataset. So nobody may write to it but the user who reads it,
and root. In a directory to which others may write, or that is somebody else's, a user has a
directory of its own, ``dsprep-cache-UID``. A cache that is shared is another thing, and asked for:
there everybody is trusted who may write to the directory.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from dsprep.errors import UsageError
from dsprep.storage.directory import Directory

OWN = "dsprep-cache-"
"""How the name of a user's own directory begins, in one that others may write to."""


class Root(Directory):
    """The directory with all copies, open.

    Parameters
    ----------
    path, fd
        As of `Directory`.
    shared
        Whether copies of everybody count who may write to it.
    """

    def __init__(self, path: Path, fd: int, shared: bool = False) -> None:
        super().__init__(path, fd)
        self.shared = shared

    @classmethod
    def find(cls, path: Path, *, shared: bool, create: bool) -> Root:
        """Return the directory that a user's copies are in.

        Raises
        ------
        UsageError
            If it is not there, and not to be made.
        PermissionError
            If somebody else has made it.
        OSError
            If it cannot be made.
        """
        if create and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o777 if shared else 0o755, exist_ok=True)
        elif not path.is_dir():
            raise UsageError("there is no such directory", where=path)
        root = cls.open(path, shared=shared)
        if shared or root.is_trusted(root.status):
            return root
        name = f"{OWN}{os.geteuid()}"
        if create:
            with suppress(FileExistsError):
                root.make(name, 0o700)
        try:
            own = root._checked(name)
        except FileNotFoundError as error:
            raise UsageError(
                "others may write to it, or it is somebody else's, and you have no cache in it",
                where=path,
                fix="add --shared for what is in it for all",
            ) from error
        return cls(own.path, os.dup(own.fd))

    def copy(self, name: str) -> Directory:
        """Open the directory of a copy.

        Raises
        ------
        FileNotFoundError
            If there is none.
        PermissionError
            If others can write to it.
        OSError
            If something else has the name.
        """
        return self.directory(name) if self.shared else self._checked(name)

    def _checked(self, name: str) -> Directory:
        directory = self.directory(name)
        if not self.is_trusted(directory.status):
            raise PermissionError(
                errno.EPERM,
                f"user {directory.status.st_uid} has made it, or others may write to it; remove "
                "it, or "
                "take another directory for the cache",
                str(directory.path),
            )
        return directory
