"""The training loop of DLIO gets every sample once per epoch, on any ranks."""

from __future__ import annotations

import enum
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from adapter_contract import COUNT, PLAIN, made

from dsprep.errors import UsageError
from dsprep.sidecar.spec import sidecar_path

FOLDER = Path(__file__).parents[1] / "examples" / "dlio"

Shuffle = enum.Enum("Shuffle", {"OFF": "off", "SEED": "seed"})
Dataset = enum.Enum("DatasetType", {"TRAIN": "train", "VALID": "valid"})


class Base:
    """What DLIO's base class does for its loaders."""

    given = SimpleNamespace()

    def __init__(self, _format, dataset_type, epoch, _kind):
        self._args, self.dataset_type, self.epoch_number = self.given, dataset_type, epoch
        is_train = dataset_type is Dataset.TRAIN
        self.num_samples = self.given.samples if is_train else self.given.samples_eval
        self.batch_size = self.given.batch_size if is_train else self.given.batch_size_eval


@pytest.fixture
def dlio(monkeypatch):
    """The example, on a package of the same names as DLIO."""
    members = {
        "common.enumerations": {"DataLoaderType": SimpleNamespace(PYTORCH=0), "Shuffle": Shuffle},
        "data_loader.base_data_loader": {"BaseDataLoader": Base},
    }
    for name in ("", ".common", ".data_loader", *(f".{name}" for name in members)):
        module = ModuleType(f"dlio_benchmark{name}")
        vars(module).update(members.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "dlio_loader", raising=False)
    yield importlib.import_module("dlio_loader")
    sys.modules.pop("dlio_loader", None)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """100 samples, whose labels are their numbers, in DLIO's folder of training data."""
    folder = tmp_path_factory.mktemp("data")
    path = made(folder, PLAIN)[0]
    path.rename(folder / "train")
    sidecar_path(path).rename(sidecar_path(folder / "train"))
    return folder / "train"


def opened(dlio, train, kind=Dataset.TRAIN, cls=None, **given):
    Base.given = SimpleNamespace(
        my_rank=0,
        comm_size=1,
        batch_size=5,
        batch_size_eval=4,
        seed=3,
        epochs=2,
        samples=COUNT,
        samples_eval=COUNT,
        read_threads=1,
        sample_shuffle=Shuffle.SEED,
        file_shuffle=Shuffle.OFF,
        data_folder=str(train.parent),
    )
    vars(Base.given).update(given)
    loader = (cls or dlio.Loader)("npz", kind, 1)
    loader.read()
    return loader


def epoch(loader, steps):
    """The labels that an epoch of DLIO sees, which leaves its loop at the last step."""
    seen = []
    for step, batch in enumerate(loader.next(), 1):
        assert len(batch["label"]) == loader.batch_size
        seen += batch["label"].tolist()
        if step == steps:
            break
    loader.finalize()
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_in_each_epoch(dlio, train, ranks):
    steps, orders = COUNT // 5 // ranks, []
    loaders = [opened(dlio, train, my_rank=rank, comm_size=ranks) for rank in range(ranks)]
    for _ in range(2):
        seen = [epoch(loader, steps) for loader in loaders]
        assert [len(each) for each in seen] == [COUNT // ranks] * ranks
        orders.append([label for each in seen for label in each])
        assert sorted(orders[-1]) == list(range(COUNT))
    assert orders[0] != orders[1] != sorted(orders[1])
    for loader in loaders:
        loader._reader.close()


def test_an_epoch_that_dlio_leaves_early_is_not_continued(dlio, train, caplog):
    """It takes fewer steps where it counts fewer samples, or total_training_steps says so."""
    with caplog.at_level(logging.WARNING):
        loader = opened(dlio, train, samples=50, sample_shuffle=Shuffle.OFF)
    assert "takes 10 of the 20 steps" in caplog.text
    for _ in range(2):
        assert epoch(loader, 10) == list(range(50))
    loader._reader.close()


def test_more_samples_than_there_are_are_refused(dlio, train):
    with pytest.raises(UsageError, match=r"expected 105, files times .*, found 100\)"):
        opened(dlio, train, samples=105)


def test_the_environment_names_datasets_and_a_class_has_options(dlio, train, tmp_path, monkeypatch):
    class Labels(dlio.Loader):
        options = {"fields": "label", "shuffle": "none"}  # noqa: RUF012

    monkeypatch.setenv("DSPREP_VALID", str(train))
    loader = opened(dlio, tmp_path / "none", Dataset.VALID, Labels)
    batch = next(iter(loader.next()))
    assert list(batch) == ["label"]
    assert batch["label"].tolist() == [0, 1, 2, 3]
    loader.finalize()
    loader._reader.close()
