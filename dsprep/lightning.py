"""`Data`: batches for a Lightning ``Trainer``, continued to the batch from every checkpoint.

>>> from dsprep.lightning import Data
>>> train = {"path": "train.h5", "batch_size": 256}
>>> data = Data(train, val=Batches("val.h5", 256))  # doctest: +SKIP
>>> trainer.fit(model, data, ckpt_path="last")  # doctest: +SKIP

Lightning restores the state of a loader only if the checkpoint was written within an epoch. One
that is saved after a training was stopped, by ``max_steps`` or ``max_time``, counts the epoch as
done, and what is left of it would be replaced by the beginning of epoch 0. The state of a
``LightningDataModule`` is always restored: the next epoch of Lightning is then the rest of that
one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from dsprep.errors import MissingExtra

try:
    import lightning
except ImportError as error:
    raise MissingExtra(
        "dsprep.lightning needs Lightning", fix="pip install 'dsprep[lightning]'"
    ) from error

from dsprep.torch import Batches

# It warns of workers, which Batches do not have.
warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")

Given: TypeAlias = Batches | Mapping[str, Any]


class Data(lightning.LightningDataModule):
    """Batches of a training, and of its validation, test and prediction, with their states.

    Parameters
    ----------
    train, val, test, predict
        `Batches`, or the arguments that they are made with; None: there are none.

    Attributes
    ----------
    batches
        The `Batches`, by those names.
    """

    def __init__(
        self,
        train: Given | None = None,
        *,
        val: Given | None = None,
        test: Given | None = None,
        predict: Given | None = None,
    ) -> None:
        super().__init__()
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self.batches = {
            name: value if isinstance(value, Batches) else Batches(**value)
            for name, value in given.items()
            if value is not None
        }

    def train_dataloader(self) -> Batches:
        """Return the batches of the training."""
        return self.batches["train"]

    def val_dataloader(self) -> list[WholeEpochs]:
        """Return the batches of the validation; none without one."""
        return self._whole("val")

    def test_dataloader(self) -> list[WholeEpochs]:
        """Return the batches of the test; none without one."""
        return self._whole("test")

    def predict_dataloader(self) -> list[WholeEpochs]:
        """Return the batches of the prediction; none without one."""
        return self._whole("predict")

    def _whole(self, name: str) -> list[WholeEpochs]:
        return [WholeEpochs(self.batches[name])] if name in self.batches else []

    def state_dict(self) -> dict[str, Any]:
        """Return where the training is, to the batch."""
        return {"train": self.batches["train"].state_dict()} if "train" in self.batches else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the training there; Lightning calls it before its loops begin."""
        if "train" in self.batches:
            self.batches["train"].load_state_dict(state_dict["train"])


class WholeEpochs:
    """Batches of which every loop runs through epoch 0, also after one that was left early.

    Lightning leaves loops through validation data early: its sanity check takes two steps.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._batches.set_epoch(0)
        return iter(self._batches)
