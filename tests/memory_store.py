"""A store that holds its files in memory: what reads it can assume no path, and no descriptor."""

from __future__ import annotations

from pathlib import Path

from dsprep.errors import ChangedError
from dsprep.storage.base import Handle, Store, made_status


class MemoryFile(Handle):
    """A file of a `MemoryStore`."""

    def __init__(self, store, key, name):
        self.name, self._store, self._key = name, store, key
        if key not in store.files:
            raise FileNotFoundError(2, "No such file or directory", name)
        self.nbytes, self.mtime_ns = self.look()

    def pread(self, nbytes, offset):
        self._store.reads += 1
        return self._store.files[self._key][0][offset : offset + nbytes]

    def look(self, offset=None):
        found = self._store.stat(self._key)
        return found.st_size, found.st_mtime_ns


class MemoryStore(Store):
    """Files by names: their bytes, and how often they were written."""

    def __init__(self):
        self.files, self.reads, self.versions = {}, 0, 0

    def add(self, path, prefix=""):
        """Take a file, or all in a directory."""
        for file in sorted(p for p in [path, *path.rglob("*")] if p.is_file()):
            self.put(f"{prefix}{file.relative_to(path.parent)}", file, overwrite=True)

    def open(self, name, path, known=None):
        if known is not None and known.etag and known.etag != self.etag(name):
            raise ChangedError("the file is of another version", where=path)
        return MemoryFile(self, name, path)

    def stat(self, name):
        if name in self.files:
            data, version = self.files[name]
            return made_status(len(data), version, version)
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

    def etag(self, name):
        if name not in self.files:
            raise FileNotFoundError(2, "No such file or directory", name)
        return str(self.files[name][1])

    def put(self, name, data, *, overwrite):
        there = name in self.files and str(self.files[name][1])
        if overwrite not in (True, there):
            raise FileExistsError(17, "File exists", name)
        self.versions += 1
        data = data if isinstance(data, bytes) else Path(data).read_bytes()
        self.files[name] = data, self.versions * 10**9 + 1
        return self.etag(name)

    def remove(self, name):
        self.files.pop(name, None)
