"""A training by Lightning that ends early, and one that continues from its checkpoint.

What each rank saw is in a file of JSON: labels by epoch, before and after.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path

warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402

from dsprep.torch import Batches  # noqa: E402

DATA, DIRECTORY = map(Path, sys.argv[1:3])
HOW = sys.argv[6]
BATCH_SIZE, RANKS, EPOCHS, STOP = map(int, [*sys.argv[3:6], sys.argv[7]])


class Model(lightning.LightningModule):
    """Notes the labels that it sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), {}

    def train_dataloader(self):
        return Batches(DATA, BATCH_SIZE, seed=1)

    def training_step(self, batch, step):
        self.seen.setdefault(self.current_epoch, []).extend(batch["label"].tolist())
        return self.layer(batch["x"]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Killed(Exception):
    """Ends a training as an error does."""


class Kill(Callback):
    """Ends it some steps after the checkpoint."""

    def on_train_batch_end(self, trainer, model, *_):
        if HOW == "killed" and trainer.global_step == STOP + 3:
            raise Killed


def fit(model, callbacks, checkpoint=None, **options):
    """Train, on as many processes as asked for."""
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
        max_epochs=EPOCHS,
        **options,
    )
    trainer.fit(model, ckpt_path=checkpoint, weights_only=False)
    return trainer


first, second = Model(), Model()
kept = ModelCheckpoint(DIRECTORY, "last", every_n_train_steps=STOP, enable_version_counter=False)
with suppress(Killed):
    fit(first, [kept, Kill()], max_steps=STOP if HOW == "max_steps" else -1)
trainer = fit(second, [], DIRECTORY / "last.ckpt")
found = {"before": first.seen, "after": second.seen, "steps": trainer.global_step}
(DIRECTORY / f"{trainer.global_rank}.json").write_text(json.dumps(found))
