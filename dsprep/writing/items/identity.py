"""Whether a call for items is the one that was interrupted: a digest of what it is made of.

What counts are values: the items, and of the function its closure, defaults, attributes, the
object that a method is of, and the global values to which it refers, and so do the functions and
classes that it uses. Functions and classes of installed packages are their names. What has a state
is walked as `pickle` does it, but the digest depends on neither the order of sets nor the addresses
of objects: the same script has the same digests when it runs again.

The code of functions is kept apart: a function may be corrected while its items are done.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path, PosixPath, PurePosixPath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.errors import describe
from dsprep.storage.ranges import as_bytes

CHUNK = 1 << 14
"""Items that are looked at together."""

LARGE = 1 << 14
"""Bytes of an array from which on it is read once only, however often it is referred to."""

_ATOMS = frozenset(
    {type(None), type(...), bool, int, float, complex, str, range, PosixPath, PurePosixPath}
)
"""Types of which `repr` has all."""


@dataclass(frozen=True)
class Identity:
    """What a call is made of.

    Attributes
    ----------
    items
        A digest of the items.
    values
        Of all that the function refers to by a name: that, in words, and a digest of its value.
    code
        A digest of the code of the function, and of those that it calls.
    unknown
        The names of which the values cannot be told apart, and what these are.
    """

    items: str
    values: Mapping[str, str]
    code: str
    unknown: Mapping[str, str]

    def differing(self, values: Mapping[str, str]) -> list[str]:
        """Return the names that have another value there; others belong to another code."""
        return sorted(n for n, v in self.values.items() if n in values and values[n] != v)


def identify(function: Callable[..., Any], items: Sequence[Any]) -> Identity:
    """Return what a call is made of."""
    walk = _Walk()
    walk.start(function)
    walk.name("items", items, whole=_is_list(items))
    if "items" in walk.unknown and not _is_list(items):
        del walk.values["items"], walk.unknown["items"]
        walk.name("items", iter(items), whole=True)
    walk.finish()
    return Identity(walk.values.pop("items"), walk.values, walk.code.hexdigest(), walk.unknown)


def _is_list(items: Sequence[Any]) -> bool:
    return type(items) in (list, tuple)


class _UnknownError(Exception):
    """The state of an object cannot be determined."""


class _Walk:
    """Makes digests of values, each under a name."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.code = hashlib.sha256()
        self._state = hashlib.sha256()
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._large: dict[int, tuple[bytes, Any]] = {}
        self._named: dict[int, Any] = {}
        self._next: list[Any] = []
        self._plain: dict[type, str] = {}
        self._is_users = lru_cache(maxsize=None)(_is_users)

    def start(self, function: object) -> None:
        """Begin with what is called: a function, a method, an object or a `partial` of these."""
        name = name_of(function)
        if isinstance(function, partial):
            self.start(function.func)
            arguments = enumerate(function.args), function.keywords.items()
            for key, value in chain(*arguments):
                self.name(f"argument {key} of {name}", value)
        elif isinstance(function, MethodType):
            self._follow(function.__func__)
            self.start(function.__self__)
        elif isinstance(function, FunctionType | type):
            self._follow(function)
            if isinstance(function, FunctionType) and function.__name__ == "<lambda>":
                self.name(f"code of {name}", function.__code__)  # it has no name
        elif self._is_users(type(function).__module__) and _has_plain_state(function):
            self._follow(type(function))
            for key, value in vars(function).items():
                self.name(f"attribute {key} of {name}", value)
        else:
            self.name(name, function)

    def finish(self) -> None:
        """Walk through all functions and classes that were met."""
        while self._next:
            met = self._next.pop(0)
            (self._class if isinstance(met, type) else self._function)(met)

    def name(self, name: str, value: Any, *, whole: bool = False) -> None:
        """Keep the digest of a value; `whole`: of several."""
        outer = self._state, self._numbers
        self._state, self._numbers = hashlib.sha256(), {}
        try:
            if whole:
                self._rows(value)
            else:
                self._add(value)
            digest = self._state.hexdigest()
        except Exception as error:  # what cannot be determined must not end the call
            unknown = isinstance(error, _UnknownError)
            self.unknown[name] = str(error) if unknown else describe(error)
            digest = type(value).__name__
        finally:
            self._state, self._numbers = outer
        if self.values.get(name):  # of several functions of one name
            digest = hashlib.sha256(f"{self.values[name]} {digest}".encode()).hexdigest()
        self.values[name] = digest

    # --- functions and classes -------------------------------------------------------------------

    def _follow(self, met: object) -> None:
        """Have the names that a function or class refers to walked through, once."""
        if id(met) not in self._named:
            self._named[id(met)] = met
            self._next.append(met)

    def _function(self, function: FunctionType) -> None:
        name, code = name_of(function), function.__code__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing was assigned to it
                continue
            self.name(f"{key} of {name}", value)
        if not self._is_users(function.__globals__.get("__name__")):
            return
        self.code.update(self._code(code))
        given = function.__defaults__ or ()
        defaults = dict(zip(code.co_varnames[code.co_argcount - len(given) :], given, strict=False))
        for key, value in (defaults | (function.__kwdefaults__ or {})).items():
            self.name(f"default {key} of {name}", value)
        for key, value in vars(function).items():
            self.name(f"attribute {key} of {name}", value)
        loaded, stored = _globals_of(code)
        for key in sorted(loaded & function.__globals__.keys()):
            text = f"global {key} of {name}"
            if key in stored:
                self.values[text], self.unknown[text] = "", "the function assigns it"
            else:
                self._global(text, function.__globals__[key], code.co_names)

    def _global(self, text: str, value: Any, names: tuple[str, ...]) -> None:
        """Keep a global value; of a user's module those that are referred to."""
        if not isinstance(value, ModuleType):
            self.name(text, value)
        elif self._is_users(value.__name__):
            for key in sorted(set(names) & vars(value).keys()):
                inner = f"global {key} of {value.__name__}"
                if inner not in self.values:
                    self.values[inner] = ""  # as modules may refer to each other
                    self._global(inner, vars(value)[key], names)

    def _class(self, cls: type) -> None:
        for base in cls.__bases__:
            if self._is_users(base.__module__):
                self._follow(base)
        for key, value in vars(cls).items():
            inner = [getattr(value, n, None) for n in ("__func__", "func", "fget", "fset")]
            functions = [f for f in (value, *inner) if isinstance(f, FunctionType)]
            for function in functions:
                self._follow(function)
            slot = isinstance(value, MemberDescriptorType | GetSetDescriptorType)
            if not (functions or slot or key.startswith("__") or key == "_abc_impl"):
                self.name(f"attribute {key} of {name_of(cls)}", value)

    def _code(self, code: CodeType) -> bytes:
        """Return a digest of code, without its lines and file."""
        names = code.co_names, code.co_varnames
        facts = code.co_code, code.co_exceptiontable, code.co_flags, *names, *code.co_consts
        return self._apart(facts)

    # --- values ----------------------------------------------------------------------------------

    def _apart(self, value: Any) -> bytes:
        """Return the digest of a value by itself."""
        outer = self._state, self._numbers
        self._state, self._numbers = hashlib.sha256(), {}
        try:
            self._add(value)
            return self._state.digest()
        finally:
            self._state, self._numbers = outer

    def _put(self, kind: str, data: bytes | memoryview | str = b"") -> None:
        data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        self._state.update(f"{kind} {len(data)} ".encode("utf-8", "surrogatepass"))
        self._state.update(data)

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in (bytes, bytearray):
            self._put(kind.__name__, bytes(value))
        elif kind in _ATOMS:
            self._put(kind.__name__, repr(value))
        elif kind is tuple:
            self._rows(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._array(value)
        elif isinstance(value, FunctionType):
            self._put("function", name_of(value))
            if value.__code__.co_name == "<lambda>":  # which is no name
                self._put("code", self._code(value.__code__))
            self._follow(value)
        elif isinstance(value, type):
            self._put("class", f"{value.__module__}.{value.__qualname__}")
            if self._is_users(value.__module__):
                self._follow(value)
        elif isinstance(value, ModuleType):
            self._put("module", value.__name__)
        elif isinstance(value, MethodType | BuiltinFunctionType):
            self._put("method", f"{getattr(value, '__module__', None)}.{value.__qualname__}")
            if isinstance(value, MethodType):
                self._add(value.__func__)
            if not isinstance(value.__self__, ModuleType):
                self._add(value.__self__)
        elif isinstance(value, CodeType):
            self._put("code", self._code(value))
        elif not self._again(value):
            if kind is list:
                self._rows(value)
            elif kind is dict:
                self._pairs(value)
            elif kind in (set, frozenset):
                self._put(kind.__name__, b"".join(sorted(map(self._apart, value))))
            else:
                self._object(value)

    def _again(self, value: Any) -> bool:
        """Whether an object was met under this name before: then that it is the same one counts."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers), value  # which keeps its address
            return False
        self._put("same", str(self._numbers[id(value)][0]))
        return True

    def _rows(self, rows: Iterable[Any]) -> None:
        """Add the values of a sequence, many of one plain type at once."""
        self._put(type(rows).__name__)
        for chunk in _chunks(rows):
            kinds = set(map(type, chunk))
            if kinds <= {tuple, list} and set(map(type, chain.from_iterable(chunk))) <= _ATOMS:
                self._put("rows", repr(chunk))
            elif kinds <= _ATOMS:
                self._put("values", repr(chunk))
            elif len(kinds) == 1 and issubclass(next(iter(kinds)), np.number | np.bool_):
                self._array(np.array(chunk))
            else:
                for value in chunk:
                    self._add(value)
        self._put("end")

    def _pairs(self, pairs: Mapping[Any, Any]) -> None:
        self._put("dict", str(len(pairs)))
        for key, value in pairs.items():
            self._add(key)
            self._add(value)

    def _array(self, array: Array | np.generic) -> None:
        if isinstance(array, np.memmap) and array.filename is not None:
            self._mapped(array)
        elif isinstance(array, np.ma.MaskedArray):
            self._put("masked")
            self._array(np.ma.getdata(array))
            self._array(np.ma.getmaskarray(array))
        elif array.dtype.hasobject:
            self._put("objects", f"{array.dtype} {array.shape}")
            self._rows(array.reshape(-1).tolist())
        elif type(array) is np.ndarray or isinstance(array, np.generic):
            self._put("array", f"{array.dtype!r} {array.shape}")
            if array.nbytes < LARGE:
                self._put("bytes", array.tobytes())
                return
            if id(array) not in self._large:
                data = as_bytes(np.ascontiguousarray(array))
                self._large[id(array)] = hashlib.sha256(data).digest(), array
            self._put("digest", self._large[id(array)][0])
        elif not self._again(array):
            self._object(array)

    def _mapped(self, array: np.memmap[Any, Any]) -> None:
        """Add an array of a file by what that is: all of it would be too much to read."""
        path = Path(str(array.filename))
        try:
            stat = path.stat()
        except OSError as error:
            raise _UnknownError(f"an array of {path}: {error.strerror}") from error
        base: Any = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        facts = path.absolute(), stat.st_size, stat.st_mtime_ns, getattr(base, "offset", 0), start
        self._put("mapped", repr((*facts, array.dtype, array.shape, array.strides)))

    def _object(self, value: Any) -> None:
        """Add an object by what makes it again, as `pickle` does."""
        kind = type(value)
        if kind in self._plain:
            self._put("plain", self._plain[kind])
            self._attributes(vars(value), self._plain[kind])
            return
        if self._is_users(kind.__module__) and _has_plain_state(value):
            self._plain[kind] = f"{kind.__module__}.{kind.__qualname__}"
            self._follow(kind)
            self._object(value)
            return
        if hasattr(kind, "detach") and hasattr(kind, "__array__"):  # a tensor: maybe with gradients
            try:
                array = np.asarray(value.detach().cpu())
            except Exception as error:
                raise _UnknownError(f"a {kind.__name__}") from error
            self._put("tensor", f"{kind.__module__}.{kind.__qualname__}")
            self._array(array)
            return
        try:
            reduce = copyreg.dispatch_table.get(kind)
            made: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception as error:  # of any kind, from anywhere
            raise _UnknownError(f"a {kind.__name__}") from error
        if isinstance(made, str):
            self._put("global", f"{getattr(value, '__module__', None)}.{made}")
            if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
                self._follow(wrapped)  # such as of functools.lru_cache
            return
        again, arguments, state, rows, pairs = (*made, None, None, None)[:5]
        self._put("object", f"{kind.__module__}.{kind.__qualname__}")
        self._add(again)
        self._rows(arguments)
        name = f"{kind.__module__}.{kind.__qualname__}" if self._is_users(kind.__module__) else ""
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                self._attributes(part, name)
            else:
                self._add(part)
        self._rows(rows or ())
        for key, inner in pairs or ():
            self._add(key)
            self._add(inner)

    def _attributes(self, state: Mapping[Any, Any], name: str) -> None:
        """Add attributes; `name`: the user's class, of which some may be unknown."""
        self._put("attributes", str(len(state)))
        if set(map(type, state.values())) <= _ATOMS and set(map(type, state)) == {str}:
            self._put("values", repr(state))
            return
        for key, value in state.items():
            self._add(key)
            try:
                self._add(value)
            except _UnknownError as error:
                if not name:
                    raise
                self.unknown[f"attribute {key} of {name}"] = str(error)


def _chunks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    if isinstance(rows, list | tuple):
        for start in range(0, len(rows), CHUNK):
            yield list(rows[start : start + CHUNK])
        return
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _has_plain_state(value: Any) -> bool:
    """Whether the state of an object is its attributes."""
    names = "__reduce_ex__", "__reduce__", "__getstate__"
    plain = all(getattr(type(value), n, None) is getattr(object, n, None) for n in names)
    return plain and hasattr(value, "__dict__")


def name_of(function: Any) -> str:
    """Return the module and qualified name of a function, or of the class of what is called."""
    if isinstance(function, partial):
        return f"partial({name_of(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the globals that code refers to, and of those that it assigns."""
    loaded, stored = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(step.argval)
        elif step.opname == "STORE_GLOBAL":
            stored.add(step.argval)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            more, assigned = _globals_of(const)
            loaded |= more
            stored |= assigned
    return frozenset(loaded), frozenset(stored)


_INSTALLED = tuple(
    f"{path}{os.sep}"
    for path in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[2],
    )
)


def _is_users(name: Any) -> bool:
    """Whether a module is not one of Python or of an installed package."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return name.partition(".")[0] not in sys.stdlib_module_names
    packages = {"site-packages", "dist-packages"}
    return not (file.startswith(_INSTALLED) or packages.intersection(Path(file).parts))
