"""Train a 1D CNN with PyTorch, stop in the middle of an epoch, and go on as if nothing happened.

Makes voltage traces as of Neuron-Inverter (``dsprep synth``), repacks them so that one read
fetches a group of samples, and trains twice: to the end, with a checkpoint on the way, and once
more from that checkpoint. Every batch and every weight after it has to be the same. Uses a GPU
if there is one; the next batch is then copied while this one is computed.

    python examples/train_neuron_torch.py
    python examples/train_neuron_torch.py --samples 20000 --scale 1 --batch-size 128 --epochs 10

With the path of such data it trains on these, in one process or in all that torchrun or srun
started (``slurm_train.sh``), and continues from the checkpoint if there is one:

    torchrun --nproc-per-node 2 examples/train_neuron_torch.py DATA --checkpoint last.pt

The parameters to find are random numbers, so the loss shows that training runs, no more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dsprep
from dsprep.reader.ranks import detect
from dsprep.synth import synth
from dsprep.torch import Batches


def make(folder: Path, samples: int, scale: float) -> Path:
    """Write the dataset and return its repacked form."""
    synth("neuron-inverter", folder / "made", samples=samples, scale=scale)
    fields = ("train_frames", "train_unit_par")
    dsprep.repack(folder / "made", folder / "neuron.h5", fields=fields, buffer_size=128)
    return folder / "neuron.h5"


def network(probes: int, parameters: int) -> nn.Module:
    """Return convolutions over time, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in ((probes, 16), (16, 32), (32, 64)):
        layers += [nn.Conv1d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, parameters))


@dataclass
class Run:
    """What a training run saw, and what came out of it."""

    batches: list[int]  # CRC-32 of every batch
    loss: float
    weights: list[torch.Tensor]


def train(
    path: Path,
    batch_size: int,
    epochs: int,
    device: str,
    save: tuple[range, Path] | None = None,
    resume: Path | None = None,
) -> Run:
    """Train from the beginning, or from a checkpoint; save one after some of the steps."""
    torch.manual_seed(0)
    batches = Batches(path, batch_size, seed=1, remainder="drop", device=device, epochs=epochs)
    traces, values = (batches.reader.schema[name] for name in ("train_frames", "train_unit_par"))
    model = network(traces.shape[-1], values.shape[0]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    seen, loss = [], torch.zeros(())
    if resume is not None:
        found = torch.load(resume, map_location=device, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        batches.load_state_dict(found["batches"])
    whole = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    first = not dist.is_initialized() or dist.get_rank() == 0
    while batches.epoch < epochs:
        for batch in batches:
            x, y = batch["train_frames"], batch["train_unit_par"]
            loss = nn.functional.mse_loss(whole(x.transpose(1, 2)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(zlib.crc32(x.cpu().numpy()))
            if save is not None and first and len(seen) in save[0]:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "batches": batches.state_dict(),
                }
                new = save[1].with_suffix(".new")
                torch.save(state, new)
                new.replace(save[1])  # a job that is killed leaves the old one or the new one
    batches.close()
    return Run(seen, loss.item(), [p.detach().cpu() for p in model.parameters()])


def train_on(data: Path, options: argparse.Namespace) -> None:
    """Train on given data, with other processes if there are any."""
    place = detect()
    if options.device == "cuda":
        torch.cuda.set_device((place.local_rank or 0) % torch.cuda.device_count())
    if place.world_size > 1:  # torchrun, or the job script, sets MASTER_ADDR, where they meet
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size)
    resume = save = None
    if options.checkpoint is not None:
        save = range(options.save_every, sys.maxsize, options.save_every), options.checkpoint
        resume = options.checkpoint if options.checkpoint.exists() else None
    done = train(data, options.batch_size, options.epochs, options.device, save, resume)
    if place.rank == 0:
        what = "continued" if resume else "trained"
        print(f"{what} with {place}: {len(done.batches)} steps, loss {done.loss:.4f}")
        print("its last batches", *(f"{crc:08x}" for crc in done.batches[-5:]))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Train, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, help="repacked; made if not given")
    parser.add_argument("--checkpoint", type=Path, help="of DATA: continue from it, and write it")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one to the next")
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--scale", type=float, default=0.25, help="1: traces of 1600 points")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.data is not None:
        train_on(options.data, options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make(folder, options.samples, options.scale)
        with dsprep.Reader(path, options.batch_size, remainder="drop") as reader:
            steps = len(reader)
        half = steps * (options.epochs - 1) + steps // 2  # in the middle of the last epoch
        arguments = path, options.batch_size, options.epochs, options.device
        whole = train(*arguments, save=(range(half, half + 1), folder / "checkpoint.pt"))
        rest = train(*arguments, resume=folder / "checkpoint.pt")
    assert len(whole.batches) == steps * options.epochs
    assert rest.batches == whole.batches[half:], "other batches came after the checkpoint"
    if options.device == "cpu":  # on a GPU, sums are not added up in a fixed order
        for a, b in zip(whole.weights, rest.weights, strict=True):
            assert torch.equal(a, b), "other weights came out"
    print(f"{options.epochs} epochs of {steps} steps on {options.device}, loss {whole.loss:.4f}")
    print(f"resumed after step {half}: the same {len(rest.batches)} batches, loss {rest.loss:.4f}")


if __name__ == "__main__":
    main()
