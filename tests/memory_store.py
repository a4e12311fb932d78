"""A store that holds its files in memory: what reads it can assume no path, and no descriptor."""

from __future__ import annotations

from pathlib import Path

from dsprep.storage.base import Handle, Store, made_status
from dsprep.storage.identity import status


class MemoryFile(Handle):
    """A file of a `MemoryStore`."""

    def __init__(self, store, key, name):
        self.name, self._store, self._key = name, store, key
        if key not in store.files:
            raise FileNotFoundError(2, "No such file or directory", name)
        self.status = self.identify()
        self.nbytes = self.status.nbytes

    def pread(self, nbytes, offset):
        self._store.reads += 1
        return self._store.files[self._key][0][offset : offset + nbytes]

    def identify(self, offset=None):
        return status(self._store.stat(self._key))


class MemoryStore(Store):
    """Files by names: their bytes, and how often they were written."""

    def __init__(self):
        self.files, self.reads = {}, 0

    def add(self, path, prefix=""):
        """Take a file, or all in a directory."""
        for file in sorted(p for p in [path, *path.rglob("*")] if p.is_file()):
            self.put(f"{prefix}{file.relative_to(path.parent)}", file, overwrite=True)

    def open(self, name, path, known=None):
        return MemoryFile(self, name, path)

    def stat(self, name):
        if name in self.files:
            data, version = self.files[name]
            return made_status(len(data), version)
        if any(key.startswith(f"{name}/") or not name for key in self.files):
            return made_status(None)
        raise FileNotFoundError(2, "No such file or directory", name)

    def listing(self, directory):
        if directory in self.files:
            raise NotADirectoryError(20, "Not a directory", directory)
        self.stat(directory)
        start = f"{directory}/" if directory else ""
        names = {key[len(start) :].partition("/")[0] for key in self.files if key.startswith(start)}
        for name in sorted(names, reverse=True):
            yield name, self.stat(f"{start}{name}")

    def put(self, name, path, *, overwrite):
        if name in self.files and not overwrite:
            raise FileExistsError(17, "File exists", name)
        version = self.files[name][1] + 1 if name in self.files else 1
        self.files[name] = Path(path).read_bytes(), version * 10**9 + 1

    def remove(self, name):
        self.files.pop(name, None)
