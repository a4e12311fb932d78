"""The Trainer of Hugging Face, Accelerate, and torchdata take Batches as their loader."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
from adapter_contract import COUNT, PLAIN, STEPS, labels, made, of_reader

import dsprep

torch = pytest.importorskip("torch")

from dsprep.torch import Batches, Samples  # noqa: E402


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain"), PLAIN)


class Model(torch.nn.Module):
    """Notes the labels that it sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.evaluated = torch.nn.Linear(4, 1), [], 0

    def forward(self, x, label):
        if self.training:
            self.seen.append(label.tolist())
        else:
            self.evaluated += len(label)
        result = self.layer(x).mean((1, 2))
        return {"loss": result.mean(), "logits": result}


def train(path, directory, *, callbacks, checkpoint=None):
    """The model of a training of three epochs, with a checkpoint every 18 steps."""
    transformers = pytest.importorskip("transformers")
    alone = {"rank": 0, "world_size": 1}
    batches = Batches(path, 8, seed=3, **alone)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return batches

        def get_eval_dataloader(self, eval_dataset=None):
            return self.eval_dataset

    arguments = transformers.TrainingArguments(
        str(directory),
        num_train_epochs=3,
        save_steps=18,
        save_strategy="steps",
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    model, evaluated = Model(), Batches(path, 8, shuffle="none", **alone)
    trainer = Trainer(model, arguments, eval_dataset=evaluated, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="torch.utils.data")
        trainer.train(resume_from_checkpoint=checkpoint)
    return model


def test_the_trainer_of_hugging_face_continues_to_the_batch(plain, tmp_path):
    pytest.importorskip("transformers")
    from dsprep.transformers import SetEpoch

    expected = of_reader(plain[0], 3, seed=3)
    whole = train(plain[0], tmp_path, callbacks=[SetEpoch()])
    assert whole.seen == expected
    assert whole.evaluated == 3 * COUNT
    for step in (18, 36):  # in epoch 1 and in epoch 2, of 13 steps each
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        rest = train(plain[0], tmp_path, callbacks=[SetEpoch()], checkpoint=checkpoint)
        assert rest.seen == expected[step:]


ACCELERATE = """
import json, sys
from accelerate import Accelerator
from dsprep.torch import Batches

accelerator, batches = Accelerator(cpu=True), Batches(sys.argv[1], 8)
loader = accelerator.prepare(batches)
assert loader is batches
print(json.dumps([batch["label"].tolist() for batch in loader]))
"""


def test_accelerate_leaves_the_ranks_to_the_batches(plain, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "job.py").write_text(ACCELERATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path}/logs", "--redirects=3", tmp_path / "job.py", plain[0]]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    logs = {path.parent.name: path for path in (tmp_path / "logs").rglob("stdout.log")}
    assert run.returncode == 0, run.stderr
    seen = []
    for rank in range(2):
        found = json.loads(logs[str(rank)].read_text())
        with dsprep.Reader(plain[0], 8, rank=rank, world_size=2) as reader:
            assert found == labels(reader)
        seen += [label for batch in found for label in batch]
    assert sorted(seen) == list(range(COUNT))


def test_accelerate_skips_the_first_batches(plain):
    skip_first_batches = pytest.importorskip("accelerate").skip_first_batches
    batches = Batches(plain[0], 8, seed=3, rank=0, world_size=1)
    batches.set_epoch(1)
    assert labels(skip_first_batches(batches, 5)) == of_reader(plain[0], 2, seed=3)[STEPS + 5 :]


def test_a_stateful_loader_continues_to_the_batch(plain):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        batches = Batches(plain[0], 8, seed=3, rank=0, world_size=1)
        return stateful.StatefulDataLoader(batches, batch_size=None)

    first, second = loader(), loader()
    loop = iter(first)
    begun = [next(loop)["label"].tolist() for _ in range(5)]
    second.load_state_dict(first.state_dict())
    rest = labels(loop)
    assert labels(second) == rest
    assert sorted(begun + rest) == sorted(of_reader(plain[0], 1, seed=3))


# --- sets of samples ------------------------------------------------------------------------------


def seen(samples, **options):
    loader = torch.utils.data.DataLoader(samples, 8, **options)
    return [label for batch in labels(loader) for label in batch]


def test_sets_of_samples_are_those_of_torch(plain):
    utils, chosen, samples = torch.utils.data, [*range(0, COUNT, 3)], Samples(plain[0])
    assert seen(utils.Subset(samples, chosen)) == chosen
    found = [seen(p, num_workers=1) for p in utils.random_split(samples, [0.75, 0.25])]
    assert [*map(len, found)] == [75, 25]
    assert sorted(found[0] + found[1]) == list(range(COUNT))
    labelled = Samples(plain[0], fields="label")
    assert seen(utils.ConcatDataset([labelled, labelled])) == [*range(COUNT)] * 2


def test_datasets_of_hugging_face_are_written_and_made(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"x": [[i, i + 0.5] for i in range(10)], "label": [*range(10)]}
    dsprep.write(tmp_path / "x.h5", datasets.Dataset.from_dict(columns).with_format("numpy"))
    samples = Samples(tmp_path / "x.h5")
    assert not samples.schema.ragged

    def each():
        for i in range(len(samples)):
            yield samples[i]

    made = datasets.Dataset.from_generator(each, cache_dir=str(tmp_path / "cache"))
    assert made.to_dict() == columns
