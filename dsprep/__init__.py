"""dsprep prepares datasets for deep learning on HPC machines.

The public interface, imported when it is first used:

`open`
    A dataset of any format as a `Source`: ``len``, ``schema``, ``[i]``, ``[i:j]``, iteration.
`convert`
    Another format, or another layout, with the same values bit for bit.
`verify`
    Whether two sources hold the same samples.
`provenance`
    The sidecar of a dataset, from which the extent of every sample is computed.
`Sidecar`
    Reading through it: any samples, in any order, by ``pread`` alone.
`check`
    All that is wrong with a sidecar or with the data that it describes.
`Reader`
    Batches for training, read ahead and shuffled.
`Mix`
    Batches of several readers in given shares.
`each`
    A transform that applies a function to every sample, such as `decode.image`.
`pad`, `pack`
    Transforms that give ragged fields one shape: each sample in a row, or one behind another.
`stats`, `normalise`
    Minimum, mean, classes and more of every field, kept; and a transform that takes them.
`mask_and_scale`
    A transform that unpacks int16 with ``scale_factor`` and the like, missing values as NaN.
`measure`
    How long a loop waits for its loader, whatever loader it is.
`Subset`
    Some of the samples of a dataset: by number, by a condition, or one part of a split.
`repeats`
    When a mini-epoch of a Reader has been passed often enough, by the metrics of training.
`audit`
    What every rank of a job would deliver, and whether every sample comes once.
`stage`
    What a node will read, copied to its own storage before the job.
`repack`
    One rewrite, after which a single read fetches a whole group of samples.
`write`
    Samples that a program makes, as such a dataset; `Writer` takes them one by one.
`inspect`
    What a source holds and how it is stored.
`decode`, `errors`, `executors`, `torch`, `lightning`, `transformers`, `tf`, `jax`
    Modules, imported when they are first used, too; all but the first three need their framework.

>>> import dsprep
>>> with dsprep.open("train.h5") as source:  # doctest: +SKIP
...     print(len(source), source.schema)
...     batch = source[0:32]  # field name to array of 32 samples
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dsprep import decode as decode
    from dsprep import errors as errors
    from dsprep import executors as executors
    from dsprep import jax as jax
    from dsprep import lightning as lightning
    from dsprep import repeats as repeats
    from dsprep import tf as tf
    from dsprep import torch as torch
    from dsprep import transformers as transformers
    from dsprep.bench.measure import measure as measure
    from dsprep.core.schema import Arena as Arena
    from dsprep.core.schema import Field as Field
    from dsprep.core.schema import FieldSpec as FieldSpec
    from dsprep.core.schema import Ragged as Ragged
    from dsprep.core.schema import Schema as Schema
    from dsprep.errors import DsprepError as DsprepError
    from dsprep.formats.base import Source as Source
    from dsprep.formats.options import Compression as Compression
    from dsprep.formats.options import OpenOptions as OpenOptions
    from dsprep.formats.options import WriteOptions as WriteOptions
    from dsprep.reader.cached import Cache as Cache
    from dsprep.reader.each import each as each
    from dsprep.reader.loader import Reader as Reader
    from dsprep.reader.mini_epochs import MiniEpochs as MiniEpochs
    from dsprep.reader.mix import Mix as Mix
    from dsprep.reader.pack import pack as pack
    from dsprep.reader.pack import pad as pad
    from dsprep.reader.scaling import mask_and_scale as mask_and_scale
    from dsprep.reader.stats import normalise as normalise
    from dsprep.reader.stats import stats as stats
    from dsprep.reader.subset import Subset as Subset
    from dsprep.sidecar.sidecar import Sidecar as Sidecar
    from dsprep.sidecar.sidecar import StaleError as StaleError
    from dsprep.source.dataset import open_dataset as open  # noqa: F401
    from dsprep.verbs.audit import audit as audit
    from dsprep.verbs.check import check as check
    from dsprep.verbs.convert import convert as convert
    from dsprep.verbs.inspect import inspect as inspect
    from dsprep.verbs.provenance import provenance as provenance
    from dsprep.verbs.repack import repack as repack
    from dsprep.verbs.stage import stage as stage
    from dsprep.verbs.verify import verify as verify
    from dsprep.verbs.write import Writer as Writer
    from dsprep.verbs.write import write as write

_NAMES = {
    "bench.measure": ("measure",),
    "core.schema": ("Arena", "Field", "FieldSpec", "Ragged", "Schema"),
    "errors": ("DsprepError",),
    "formats.base": ("Source",),
    "formats.options": ("Compression", "OpenOptions", "WriteOptions"),
    "reader.cached": ("Cache",),
    "reader.mini_epochs": ("MiniEpochs",),
    "reader.each": ("each",),
    "reader.loader": ("Reader",),
    "reader.mix": ("Mix",),
    "reader.pack": ("pack", "pad"),
    "reader.scaling": ("mask_and_scale",),
    "reader.stats": ("normalise", "stats"),
    "reader.subset": ("Subset",),
    "sidecar.sidecar": ("Sidecar", "StaleError"),
    "source.dataset": ("open",),
    **{f"verbs.{name}": (name,) for name in ("audit", "check", "convert", "inspect", "provenance")},
    **{f"verbs.{name}": (name,) for name in ("repack", "stage", "verify")},
    "verbs.write": ("Writer", "write"),
}
"""The public names by module, below this package; `open` is called `open_dataset` there."""

_WHERE = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("decode", "errors", "executors", "repeats")
_FRAMEWORKS = ("jax", "lightning", "tf", "torch", "transformers")

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in (*_WHERE, *_MODULES, *_FRAMEWORKS):
        raise AttributeError(f"module 'dsprep' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"dsprep.{_WHERE.get(name, name)}")
    attribute = "open_dataset" if name == "open" else name
    return getattr(module, attribute) if name in _WHERE else module


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES, *_FRAMEWORKS})
