"""`SetEpoch`: has the ``Trainer`` of Hugging Face continue `dsprep.torch.Batches` to the batch.

>>> from dsprep.torch import Batches
>>> from dsprep.transformers import SetEpoch
>>> class BatchTrainer(Trainer):  # doctest: +SKIP
...     def get_train_dataloader(self):
...         return Batches("train.h5", 32)  # of each rank
>>> BatchTrainer(model, args, callbacks=[SetEpoch()]).train()  # doctest: +SKIP

A Trainer that continues skips the steps that were done of the epoch, but does not tell its loader
which epoch that is. The steps that are skipped are read.

Where TensorFlow is installed, versions of transformers before 5 need ``USE_TF=0`` in the
environment.
"""

from __future__ import annotations

from typing import Any

from dsprep.errors import MissingExtra

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtra(
        "dsprep.transformers needs transformers", fix="pip install 'dsprep[transformers]'"
    ) from error


class SetEpoch(TrainerCallback):
    """Gives the loader the number of each epoch before that begins."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Call ``set_epoch`` of the loader."""
        train_dataloader.set_epoch(int(state.epoch or 0))
