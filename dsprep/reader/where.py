"""Conditions on fields, such as ``label in (3, 5) and y > 0``: parsed, never executed as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from dsprep.core.gather import take_ragged
from dsprep.core.schema import Array, Batch, Column, Ints, Ragged, Schema, is_extension
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
    "abs": lambda values: _compute(lambda _, v: abs(v), 0, values),
    "isnan": lambda values: np.isnan(np.asarray(_number(values), np.float64)),
    "isfinite": lambda values: np.isfinite(np.asarray(_number(values), np.float64)),
    "any": lambda values: _reduced(np.any, values),
    "all": lambda values: _reduced(np.all, values),
}

_FLOAT_BITS = 53
"""Bits of whole numbers that are exact as float64."""


class _Text(np.ndarray[Any, Any]):
    """An array of the bytes of each sample's text."""


class Where:
    """A condition that samples fulfil or not.

    It knows names of fields, numbers and text, ``and``, ``or``, ``not``, comparisons, ``in`` and
    ``not in``, ``+ - * / // %``, ``x[0]`` for an element of a vector, and the functions ``abs``,
    ``isnan``, ``isfinite``, ``any`` and ``all`` (over the elements of a sample), ``len`` (rows of
    a ragged field) and ``field`` (one whose name is not a word: ``field("a/b") > 0``).

    Each sample is judged as Python judges it, whatever the others hold: whole numbers are exact,
    floats have 64 bits, and ``and`` and ``or`` look no further than they must. A float that is
    compared with a field is first rounded to the field's dtype, so that ``x == 0.1`` finds what is
    stored as 0.1. Division by zero is refused.

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
        except (TypeError, ValueError, ArithmeticError, IndexError, RecursionError) as error:
            raise self._error(str(error)) from error
        if result.dtype != bool or result.shape != (count,):
            raise self._error(
                f"it gives {result.dtype} of shape {result.shape[1:]} for a sample, not yes or no "
                "(any() and all() do so of several)"
            )
        return result

    def check(self, schema: Schema) -> None:
        """Raise `SchemaError` for a name that is not a field, `UsageError` for impossible ones."""
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
            case ast.Call(
                func=ast.Name(id="len"), args=[(ast.Name() | ast.Call()) as argument]
            ) if isinstance(column := batch.get(*_names(argument)), Ragged):
                return column.lengths
            case ast.Call(func=ast.Name(id="len")):
                raise TypeError("len is that of a ragged field")
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
                name in _FUNCTIONS
            ):
                return _FUNCTIONS[name](self._value(argument, batch))
            case ast.Subscript(value=inner, slice=index):
                return self._value(inner, batch)[:, operator.index(ast.literal_eval(index))]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return ~_truth(self._value(inner, batch))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return _compute(operator.sub, 0, self._value(inner, batch))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                each = (self._value(side, batch) for side in (left, right))
                return _compute(_ARITHMETIC[type(sign)], *each)
            case ast.BoolOp(op=word, values=parts):
                return self._combined(isinstance(word, ast.And), parts, batch)
            case ast.Compare(left=left, ops=signs, comparators=others) if not any(
                isinstance(sign, (ast.Is, ast.IsNot)) for sign in signs
            ):
                return self._compared(left, signs, others, batch)
        known = ", ".join([*_FUNCTIONS, "len", "field"])
        raise ValueError(
            f"{ast.unparse(node)} is none of what a condition may have: comparisons, in, and, or, "
            f"not, + - * / // %, and the functions {known}"
        )

    def _combined(self, every: bool, parts: list[ast.expr], batch: Batch) -> Any:
        """Return whether all parts hold, or any; samples that are decided are looked at no more."""
        out = np.array(_truth(self._value(parts[0], batch)))
        for part in parts[1:]:
            if out.ndim != 1:  # a constant, or elements of samples
                combine = np.logical_and if every else np.logical_or
                out = combine(*_aligned(out, _truth(self._value(part, batch))))
                continue
            rows = np.flatnonzero(out == every)
            some = {name: _take(batch[name], rows) for name in _names(part)}
            out[rows] = _truth(self._value(part, some))
        return out

    def _compared(
        self, left: ast.expr, signs: list[ast.cmpop], others: list[ast.expr], batch: Batch
    ) -> Any:
        """Return whether all comparisons of a chain hold."""
        results, value = [], self._value(left, batch)
        for sign, right in zip(signs, others, strict=True):
            if isinstance(sign, (ast.In, ast.NotIn)):
                if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
                    raise TypeError(f"in {ast.unparse(right)}: expected values in parentheses")
                among = [self._value(element, batch) for element in right.elts]
                hits = [_compare(operator.eq, value, each) for each in among]
                is_among = reduce(np.logical_or, hits, np.zeros(np.shape(value), bool))
                results.append(~is_among if isinstance(sign, ast.NotIn) else is_among)
                continue
            other = self._value(right, batch)
            results.append(_compare(_COMPARISONS[type(sign)], value, other))
            value = other
        return reduce(np.logical_and, results)


def _names(node: ast.expr) -> list[str]:
    """Return the fields named in a condition."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    named = [_named(c) for c in calls if isinstance(c.func, ast.Name) and c.func.id == "field"]
    functions = {id(call.func) for call in calls}
    words = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return named + [word.id for word in words if id(word) not in functions]


def _named(node: ast.Call) -> str:
    """Return the name in a call of ``field``."""
    match node:
        case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
            return name
    raise ValueError(f'{ast.unparse(node)}: expected field("NAME")')


def _values(name: str, column: Column) -> Array:
    """Return a field as numbers, or as bytes of text, in an array of a sample each."""
    if isinstance(column, Ragged):
        if column.kind == "array":
            raise ValueError(f"{name} has several rows for a sample: only len({name}) is known")
        out = np.empty(len(column), object)
        data, ends = column.values.tobytes(), column.offsets.tolist()
        out[:] = [data[low:high] for low, high in pairwise(ends)]
        return out.view(_Text)
    dtype = column.dtype
    if not is_extension(dtype) and (dtype.kind not in "biufS" or dtype.str[1:] == "f16"):
        raise ValueError(f"{name} is of dtype {dtype}, which is not compared")
    return column


def _take(column: Column, rows: Ints) -> Column:
    return take_ragged(column, rows) if isinstance(column, Ragged) else column[rows]


def _is_text(value: Any) -> bool:
    return isinstance(value, (bytes, _Text)) or np.asarray(value).dtype.kind == "S"


def _number(value: Any) -> Any:
    """Return a constant, or an array of int64, uint64, float64, or whole numbers of Python."""
    if _is_text(value):
        raise ValueError("text is only compared")
    if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
        return value
    if value.dtype.kind in "biu":
        return value.astype(np.uint64 if value.dtype.str[1:] == "u8" else np.int64, copy=False)
    return value.astype(np.float64)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")


def _exact(value: Any) -> Array:
    """Return numbers as those of Python."""
    return np.asarray(value).astype(object)


def _bits(value: Any) -> int:
    """Return the bits of the largest of whole numbers, without the sign."""
    ends = (np.min(value), np.max(value)) if np.size(value) else ()
    return max((int(end).bit_length() for end in ends), default=0)


def _aligned(*values: Any) -> list[Any]:
    """Return values with as many axes for a sample, unless they are constants."""
    axes = max(map(np.ndim, values))
    return [
        v.reshape(len(v), *[1] * (axes - v.ndim), *v.shape[1:]) if 0 < np.ndim(v) < axes else v
        for v in values
    ]


def _compute(sign: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return what Python computes of each sample; floats have 64 bits."""
    left, right = _aligned(_number(left), _number(right))
    divides = sign in (operator.truediv, operator.floordiv, operator.mod)
    if divides and bool(np.any(np.equal(right, 0))):
        raise ZeroDivisionError("it divides by zero (x != 0 and ... leaves such samples out)")
    if not np.ndim(left) and not np.ndim(right):
        return sign(left, right)
    if _is_float(left) or _is_float(right):
        return sign(*(np.asarray(v, np.float64) for v in (left, right)))
    out = sign(_exact(left), _exact(right))
    return out.astype(np.float64) if sign is operator.truediv else out


def _truth(value: Any) -> Array:
    """Return a value that is true or false for each sample."""
    out: Array = np.asarray(value)
    if out.dtype != bool:
        raise ValueError("and, or, not combine comparisons; numbers need one, such as x != 0")
    return out


def _compare(sign: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if _is_text(left) != _is_text(right):
        raise ValueError("a number is compared with text")
    left, right = _aligned(left, right)
    if not _is_text(left):
        left, right = _number(_rounded(left, right)), _number(_rounded(right, left))
        integers = [v for v in (left, right) if not _is_float(v)]
        if len(integers) == 1 and _bits(integers[0]) > _FLOAT_BITS:
            left, right = _exact(left), _exact(right)
    return np.asarray(sign(left, right), bool)


def _rounded(value: Any, field: Any) -> Any:
    """Return a constant as the dtype of the field beside it has it, if that is one of floats."""
    if not isinstance(value, float) or not isinstance(field, np.ndarray):
        return value
    if field.dtype.kind != "f" and not is_extension(field.dtype):
        return value
    near = float(np.asarray(value).astype(field.dtype))
    return near if np.isfinite(near) else value


def _reduced(function: Callable[..., Any], values: Any) -> Any:
    """Return whether any element, or all elements, of each sample are true."""
    return function(np.not_equal(_number(values), 0), axis=tuple(range(1, np.ndim(values))))
