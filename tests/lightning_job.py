"""A training by Lightning that ends early, and one that continues from its checkpoint.

What each rank saw is in a file of JSON: the labels of each step, and how many were validated.
A data module is made before ``fit``, where a process that Lightning starts does not know its rank
yet; batches are made by the model.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from dsprep.lightning import Data
from dsprep.torch import Batches

DATA, DIRECTORY = map(Path, sys.argv[1:3])
IS_MODULE, IS_KILLED = sys.argv[3] == "module", sys.argv[4] == "killed"
BATCH_SIZE, RANKS, STEPS, STOP = map(int, sys.argv[5:9])


class Model(lightning.LightningModule):
    """Notes the labels that it sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.validated = torch.nn.Linear(4, 1), [], []

    def train_dataloader(self):
        return Batches(DATA, BATCH_SIZE, seed=1)

    def training_step(self, batch, step):
        self.seen.append(batch["label"].tolist())
        return self.layer(batch["x"]).mean()

    def on_validation_epoch_start(self):
        self.validated.append(0)

    def validation_step(self, batch, step):
        self.validated[-1] += len(batch["label"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Killed(Exception):
    """Ends a training as an error does."""


class Kill(Callback):
    """Ends it some steps after the checkpoint."""

    def on_train_batch_end(self, trainer, model, *_):
        if IS_KILLED and trainer.global_step == STOP + 3:
            raise Killed


def fit(model, callbacks, steps, checkpoint=None):
    """Train, on as many processes as asked for."""
    train = {"path": DATA, "batch_size": BATCH_SIZE, "seed": 1}
    data = Data(train, val=Batches(DATA, BATCH_SIZE)) if IS_MODULE else None
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=checkpoint is None,
        default_root_dir=DIRECTORY,
        callbacks=callbacks,
        max_steps=steps,
    )
    with suppress(Killed):
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return trainer


first, second = Model(), Model()
kept = ModelCheckpoint(DIRECTORY, "last", every_n_train_steps=STOP, enable_version_counter=False)
is_saved_here = IS_MODULE and not IS_KILLED
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always", append=True)  # behind those of dsprep
    callbacks = [] if is_saved_here else [kept, Kill()]
    trainer = fit(first, callbacks, STEPS if IS_KILLED else STOP)
    if is_saved_here:
        trainer.save_checkpoint(DIRECTORY / "last.ckpt")
    trainer = fit(second, [], STEPS, DIRECTORY / "last.ckpt")
found = {
    "before": first.seen,
    "after": second.seen,
    "validated": second.validated,
    "warnings": [str(w.message) for w in warned],
}
(DIRECTORY / f"{trainer.global_rank}.json").write_text(json.dumps(found))
