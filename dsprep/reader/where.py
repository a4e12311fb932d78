"""Conditions on fields, such as ``label in (3, 5) and y > 0``: parsed, never executed as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Column, Ragged, Schema, is_extension
from dsprep.errors import UsageError

LONGEST = 10_000
"""Characters of a condition at most."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "isnan": np.isnan,
    "isfinite": np.isfinite,
    "any": lambda values: _reduced(np.any, values),
    "all": lambda values: _reduced(np.all, values),
}


class Where:
    """A condition that samples fulfil or not.

    It knows names of fields, numbers and text, ``and``, ``or``, ``not``, comparisons, ``in`` and
    ``not in``, ``+ - * / // %``, ``x[0]`` for an element of a vector, and the functions ``abs``,
    ``isnan``, ``isfinite``, ``any`` and ``all`` (over the elements of a sample), ``len`` (rows of
    a ragged field) and ``field`` (one whose name is no word: ``field("a/b") > 0``). Integers are
    computed with 64 bits; floats, and numbers beside them, with those of the field.

    Parameters
    ----------
    text
        The condition.

    Attributes
    ----------
    names
        The fields that it is about.

    Raises
    ------
    UsageError
        If it is not one.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > LONGEST:
                raise ValueError(f"it has more than {LONGEST} characters")
            self._tree = ast.parse(text.strip(), mode="eval").body
            self.names = tuple(dict.fromkeys(_names(self._tree)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"it cannot be parsed: {error}") from error
        if not self.names:
            raise self._error("it names no field")

    def __call__(self, batch: Batch) -> Array:
        """Return which samples fulfil it.

        Parameters
        ----------
        batch
            With the fields that it names.

        Returns
        -------
        array
            bool, shape ``(n,)``.

        Raises
        ------
        UsageError
            If values cannot be compared or computed in this way.
        """
        count = len(batch[self.names[0]])
        try:
            with np.errstate(all="ignore"):
                result = np.asarray(self._value(self._tree, batch))
        except (TypeError, ValueError, OverflowError, IndexError, RecursionError) as error:
            raise self._error(str(error)) from error
        if result.dtype != bool or result.shape != (count,):
            raise self._error(
                f"it gives {result.dtype} of shape {result.shape[1:]} for a sample, not yes or no "
                "(any() and all() do so of several)"
            )
        return result

    def check(self, schema: Schema) -> None:
        """Raise `SchemaError` for a name that is no field, `UsageError` for what is impossible."""
        empty: Batch = {}
        for name in self.names:
            f = schema[name]
            values = np.zeros((0, *f.inner), f.dtype)
            empty[name] = Ragged(values, np.zeros(1), f.kind) if f.ragged else values
        self(empty)

    def _error(self, problem: str) -> UsageError:
        return UsageError(
            f"the condition {self.text[:80]!r} is not possible: {problem[:200]}",
            expected="such as: label in (3, 5) and y > 0",
        )

    def _value(self, node: ast.expr, batch: Batch) -> Any:
        """Return the value of a part of the condition: a constant, or one for each sample."""
        match node:
            case ast.Constant(value=bool() | int() | float() | bytes() as constant):
                return constant
            case ast.Constant(value=str() as text):
                return text.encode()
            case ast.Name(id=name):
                return _values(name, batch[name])
            case ast.Call(func=ast.Name(id="field")):
                return _values(name := _named(node), batch[name])
            case ast.Call(func=ast.Name(id="len"), args=[argument]):
                column = batch[_names(argument)[0]]
                if isinstance(column, Ragged):
                    return column.lengths
                raise TypeError("len is that of a ragged field")
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                return _FUNCTIONS[name](_number(self._value(argument, batch)))
            case ast.Subscript(value=inner, slice=index):
                return _number(self._value(inner, batch))[:, int(ast.literal_eval(index))]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return ~_truth(self._value(inner, batch))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -_number(self._value(inner, batch))
            case ast.BinOp(left=left, op=sign, right=right):
                each = (_number(self._value(side, batch)) for side in (left, right))
                return _ARITHMETIC[type(sign)](*each)
            case ast.BoolOp(op=word, values=parts):
                combine = np.logical_and if isinstance(word, ast.And) else np.logical_or
                return reduce(combine, [_truth(self._value(part, batch)) for part in parts])
            case ast.Compare(left=left, ops=signs, comparators=others):
                return self._compared(left, signs, others, batch)
        raise ValueError(f"{ast.unparse(node)} is none of what a condition may have")

    def _compared(
        self, left: ast.expr, signs: list[ast.cmpop], others: list[ast.expr], batch: Batch
    ) -> Any:
        """Return whether all comparisons of a chain hold."""
        results, value = [], self._value(left, batch)
        for sign, right in zip(signs, others, strict=True):
            if isinstance(sign, (ast.In, ast.NotIn)):
                among = [self._value(element, batch) for element in _elements(right)]
                hits = [_compare(operator.eq, value, each) for each in among]
                found = reduce(np.logical_or, hits, np.zeros(np.shape(value), bool))
                results.append(~found if isinstance(sign, ast.NotIn) else found)
                continue
            other = self._value(right, batch)
            results.append(_compare(_COMPARISONS[type(sign)], value, other))
            value = other
        return reduce(np.logical_and, results)


def _names(node: ast.expr) -> list[str]:
    """Return the fields named in a condition; `ValueError` for what it may not have."""
    found = []
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Name(id="field")):
                found.append(_named(part))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                if name not in _FUNCTIONS and name != "len":
                    known = ", ".join([*_FUNCTIONS, "len", "field"])
                    raise ValueError(f"there is no function {name}, only {known}")
                if name == "len" and not (isinstance(argument, ast.Name) or _is_named(argument)):
                    raise ValueError("len is that of a ragged field")
            case ast.Call():
                raise ValueError(f"{ast.unparse(part)} is not a call of one argument")
            case ast.BinOp(op=sign) if type(sign) not in _ARITHMETIC:
                raise ValueError(f"{ast.unparse(part)}: only + - * / // % compute")
            case ast.Compare(ops=signs) if any(isinstance(s, (ast.Is, ast.IsNot)) for s in signs):
                raise ValueError(f"{ast.unparse(part)}: compare by == or !=")
    functions = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    names = [p.id for p in ast.walk(node) if isinstance(p, ast.Name) and id(p) not in functions]
    return found + names


def _is_named(node: ast.expr) -> bool:
    """Whether it is a call of ``field``."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field"
    )


def _named(node: ast.Call) -> str:
    """Return the name in a call of ``field``."""
    match node:
        case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
            return name
    raise ValueError(f'{ast.unparse(node)}: expected field("NAME")')


def _elements(node: ast.expr) -> list[ast.expr]:
    """Return what stands behind ``in``."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return node.elts
    raise ValueError(f"in {ast.unparse(node)}: expected values in parentheses")


def _values(name: str, column: Column) -> Array:
    """Return a field as numbers, or as bytes of text, in an array of a sample each."""
    if isinstance(column, Ragged):
        if column.kind == "array":
            raise ValueError(f"{name} has several rows for a sample: only len({name}) is known")
        out = np.empty(len(column), object)
        data, ends = column.values.tobytes(), column.offsets.tolist()
        out[:] = [data[low:high] for low, high in pairwise(ends)]
        return out
    dtype = column.dtype
    if is_extension(dtype) or dtype == np.float16:
        return column.astype(np.float32)
    if dtype.kind == "u" and dtype.itemsize == 8 and bool((column >> np.uint64(63)).any()):
        return column
    if dtype.kind in "iu":
        return column.astype(np.int64)
    if dtype.kind not in "bfS":
        raise ValueError(f"{name} is of dtype {dtype}, which has no order")
    return column


def _is_text(value: Any) -> bool:
    return isinstance(value, bytes) or np.asarray(value).dtype.kind in "SO"


def _number(value: Any) -> Any:
    """Return a value with which one can compute."""
    if _is_text(value):
        raise ValueError("text is only compared")
    return np.asarray(value).astype(np.int64) if np.asarray(value).dtype.kind == "b" else value


def _truth(value: Any) -> Array:
    """Return a value that is true or false for each sample."""
    out: Array = np.asarray(value)
    if out.dtype != bool:
        raise ValueError("and, or, not combine comparisons; numbers need one, such as x != 0")
    return out


def _compare(sign: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if _is_text(left) != _is_text(right):
        raise ValueError("a number is compared with text")
    return np.asarray(sign(left, right), bool)


def _reduced(function: Callable[..., Any], values: Array) -> Any:
    """Return whether any element, or all elements, of each sample are true."""
    return function(values, axis=tuple(range(1, np.ndim(values))))
