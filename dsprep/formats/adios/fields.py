"""Which variables are fields, and what their samples are: decided for all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsprep.core.schema import Attrs, Field, Ints
from dsprep.errors import FormatError, SchemaError, UnsupportedError, UsageError
from dsprep.formats import samples
from dsprep.formats.adios.columns import Found, NoField, by_index, by_rows, by_steps
from dsprep.formats.adios.metadata import OPERATOR, Metadata, Variable
from dsprep.formats.fields import missing_field
from dsprep.formats.options import OpenOptions
from dsprep.formats.splits import check_arrays

COUNT, FIRST, AXIS = "/variable_count", "/variable_offset", "/variable_dim"
"""What HydraGNN calls the arrays that say which rows of an array are those of a sample, and the
attribute that says along which axis."""

STEPS = "each step is a sample (--sample-axis first counts the rows of all steps instead)"


@dataclass(frozen=True)
class Chosen:
    """What a dataset holds.

    Attributes
    ----------
    count
        Samples.
    found
        The fields by name.
    rows
        Whether samples are rows of arrays.
    notes
        What was assumed and left out, one clause each.
    """

    count: int
    found: Mapping[str, Found]
    rows: bool
    notes: tuple[str, ...]


def choose(
    metadata: Metadata,
    options: OpenOptions,
    where: object,
    integers: Callable[[Found], Ints],
) -> Chosen:
    """Return the fields of a dataset.

    Parameters
    ----------
    integers
        Returns all values of an index.

    Raises
    ------
    UsageError, SchemaError
        If a field is not there, or it is doubtful what a sample is.
    UnsupportedError
        If a variable that is wanted cannot be a field.
    """
    if options.sample_axis == "groups":
        raise UsageError("--sample-axis groups applies to hdf5", where=where)
    requested = [spec.path for spec in options.fields]
    for name in requested:
        if name not in metadata.variables:
            raise missing_field(name, metadata.variables, where)
    variables = {n: metadata.variables[n] for n in requested or metadata.variables}
    check_operators(variables, where)
    graphs = indexed(metadata, where) if options.sample_axis == "auto" else {}
    if graphs and set(requested) <= graphs.keys():
        return _graphs(metadata, graphs, requested, where, integers)
    if not requested and options.sample_axis != "none":
        check_arrays(variables, where)
    notes = list(metadata.notes)
    rows = options.sample_axis == "first"
    if options.sample_axis == "auto" and metadata.steps <= 1:
        rows = _first_axis(variables, where, notes)
    elif options.sample_axis == "auto":
        check_doubt(variables, where)
        notes.append(STEPS)
    problems: dict[str, str] = {}
    located = _located(variables, rows, options.sample_axis == "auto", problems)
    _refuse(requested, problems, located, where)
    chosen, count = _agreeing(located, requested, options.sample_axis == "auto", where, notes)
    notes += [f"left out {name}: {reason}" for name, reason in problems.items()]
    return Chosen(count, chosen, rows, tuple(notes))


def _located(
    variables: Mapping[str, Variable], rows: bool, auto: bool, problems: dict[str, str]
) -> dict[str, Found]:
    """Return the variables as fields; `problems` gets why others are none.

    Unless the user says it, local arrays are samples as they are.
    """
    located = {}
    for name, variable in variables.items():
        try:
            if variable.problem or not len(variable.blocks):
                raise NoField(variable.problem or "no block of it was written")
            as_rows = rows and not (auto and variable.kind == "local")
            located[name] = by_rows(variable) if as_rows else by_steps(variable)
        except NoField as reason:
            problems[name] = str(reason)
    return located


def _refuse(
    requested: list[str], problems: Mapping[str, str], located: Mapping[str, Found], where: object
) -> None:
    for name in requested:
        if name in problems:
            raise UnsupportedError(f"{name} cannot be a field: {problems[name]}", where=where)
    if not located:
        reasons = samples.listed([f"{name}: {reason}" for name, reason in problems.items()])
        raise FormatError(
            "no variable can be a field", where=where, found=reasons or "no variables"
        )


def _agreeing(
    located: Mapping[str, Found], requested: list[str], auto: bool, where: object, notes: list[str]
) -> tuple[dict[str, Found], int]:
    """Return the fields that have as many samples, of the same steps."""
    shapes = {n: samples.Sized((f.count, *f.field.inner), f.nbytes) for n, f in located.items()}
    axis = samples.choose(shapes, "first", where)
    if auto and not requested:
        words = f"{axis.count} samples of {samples.listed(list(axis.names))}"
        samples.check_share(shapes, set(axis.names), words, where)
    if requested and set(axis.names) != set(requested):
        raise SchemaError(
            "the fields differ in their number of samples",
            where=where,
            found=", ".join(f"{n}: {f.count}" for n, f in located.items()),
        )
    notes += [n.replace("first axis", "samples:") for n in axis.notes]
    chosen = {n: located[n] for n in axis.names}
    owners: dict[str, list[str]] = {}
    for name, each in chosen.items():
        owners.setdefault(each.owner, []).append(name)
    if len(owners) > 1:
        raise SchemaError(
            "the fields have as many samples, but of other steps or writers",
            where=where,
            found="; ".join(map(samples.listed, owners.values())),
            fix="name those that go together: --field NAME",
        )
    return chosen, axis.count


def _first_axis(variables: Mapping[str, Variable], where: object, notes: list[str]) -> bool:
    """Return whether the first axis counts samples in a dataset of one step."""
    arrays = {
        n: samples.Sized(tuple(v.blocks.shape[0].tolist()), int(v.sizes.sum()))
        for n, v in variables.items()
        if v.kind == "array" and v.dims and len(v.blocks) and not v.problem
    }
    if not arrays:
        return False
    axis = samples.choose(arrays, "auto", where)
    notes += axis.notes if axis.whole_file else ()
    return not axis.whole_file


def check_doubt(variables: Mapping[str, Variable], where: object) -> None:
    """Raise `SchemaError` if steps look like batches: arrays, and a number for each of their rows.

    Steps of a simulation and batches of samples are written in the same way.
    """
    labels: dict[bytes, str] = {}
    arrays: dict[bytes, str] = {}
    for name, v in variables.items():
        if v.problem or not v.dims or not len(v.blocks) or v.kind not in ("array", "local"):
            continue
        rows = (v.blocks.shape if v.kind == "array" else v.blocks.count)[:, 0]
        if int(rows.max()) > 1:
            steps = np.unique(np.stack([v.blocks.step, rows]), axis=1)
            (labels if v.dims == 1 else arrays).setdefault(steps.tobytes(), name)
    for key in labels.keys() & arrays.keys():
        raise SchemaError(
            "it is doubtful whether steps are samples, or rows within them",
            where=where,
            found=f"{labels[key]} has a number for each row of {arrays[key]}, in every step",
            fix="say which: --sample-axis none takes each step as a sample, --sample-axis first "
            "each row",
        )


def check_operators(variables: Mapping[str, Variable], where: object) -> None:
    """Raise `UnsupportedError` if a variable went through an operator, such as a compressor."""
    for name, variable in variables.items():
        if variable.problem.startswith(OPERATOR):
            by = variable.problem.removeprefix(OPERATOR).strip()
            raise UnsupportedError(
                f"{name} went through an operator{f' ({by})' if by else ''}: its values have no "
                "offsets",
                where=where,
                fix="read it with adios2 and write it again without operators, or leave it out: "
                "name the others by --field",
            )


# --- HydraGNN --------------------------------------------------------------------------------


def indexed(metadata: Metadata, where: object) -> dict[str, int]:
    """Return the variables whose rows an index assigns to samples, and the axis of these rows.

    Raises
    ------
    FormatError
        If the variable or a part of its index is not there.
    """
    axes = {}
    for attribute, axis in metadata.attrs.items():
        name = attribute.removesuffix(AXIS)
        if name == attribute:
            continue
        missing = [n for n in (name, name + COUNT, name + FIRST) if n not in metadata.variables]
        if missing:
            raise FormatError(
                f"the attribute {attribute} says that an index assigns rows to samples, and "
                f"{missing[0]} is not there",
                where=where,
                fix="say what a sample is: --sample-axis first or --sample-axis none",
            )
        axes[name] = int(axis) if isinstance(axis, np.integer) else -1
    return axes


def _graphs(
    metadata: Metadata,
    graphs: Mapping[str, int],
    requested: list[str],
    where: object,
    integers: Callable[[Found], Ints],
) -> Chosen:
    """Return the fields of one set of samples as HydraGNN writes it."""
    names = requested or list(graphs)
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(name.rpartition("/")[0], []).append(name)
    if len(sets) > 1:
        good = [n for n in next(iter(sets.values())) if not graphs[n]]
        raise SchemaError(
            "the dataset holds several sets of samples",
            where=where,
            expected="the fields of one",
            found=", ".join(sets),
            fix="name the fields of one: " + " ".join(f"--field {n}" for n in good),
        )
    located, problems, notes = {}, {}, list(metadata.notes)
    for name in names:
        try:
            if graphs[name]:
                raise NoField(f"the axis that varies is not its first one ({name + AXIS})")
            rows, begin = (_index(metadata, name + word, integers) for word in (COUNT, FIRST))
            if len(rows) != len(begin):
                raise NoField("its index is of two lengths")
            located[name] = by_index(metadata.variables[name], begin, rows, str(len(rows)))
        except NoField as reason:
            problems[name] = str(reason)
    _refuse(requested, problems, located, where)
    used = {n + word for n in graphs for word in ("", COUNT, FIRST)}
    others = [n for n in metadata.variables if n not in used]
    if others and not requested:
        notes.append(f"left out {samples.listed(others)}: no index assigns rows to samples")
    chosen, count = _agreeing(located, requested, True, where, notes)
    notes += [f"left out {name}: {problem}" for name, problem in problems.items()]
    return Chosen(count, chosen, True, tuple(notes))


def _index(metadata: Metadata, name: str, integers: Callable[[Found], Ints]) -> Ints:
    table = by_rows(metadata.variables[name])
    if table.field.dtype.kind not in "iu" or table.field.shape:
        raise NoField(f"{name} is not a list of integers")
    return integers(table)


# --- attributes ------------------------------------------------------------------------------


def with_attributes(
    metadata: Metadata, fields: Mapping[str, Field]
) -> tuple[dict[str, Field], Attrs]:
    """Return fields with the attributes of their variables, and the attributes of the dataset."""
    own: dict[str, dict[str, Any]] = {name: {} for name in fields}
    rest: dict[str, Any] = {}
    for name, value in metadata.attrs.items():
        variable, _, word = name.rpartition("/")
        if variable in own and word:
            own[variable][word] = value
        elif variable not in metadata.variables:
            rest[name] = value
    return {n: replace(f, attrs=own[n]) for n, f in fields.items()}, rest
