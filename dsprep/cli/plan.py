"""``dsprep plan``: what training needs from storage, computed and not measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from dsprep.cli import options as opt
from dsprep.cli.report import note, print_json, print_rows, print_table, say

EPILOG = """
dsprep plan x.h5 --nodes 64 -M 64 --compute 12ms --storage storage.json

dsprep plan x.h5 -M 32 --compute 50ms --storage cori --tier 1.6TB --epochs 90

dsprep plan x.h5 --nodes 64 -M 2 --compute 129ms --simulate \\
    --storage latency=1ms,stream=500MB/s,total=20GB/s

Exit status: 0 done, 1 bad data, 2 wrong usage.
"""

STORAGE = (
    "What bench storage wrote; cori, summit, cori-lustre or lmdbio; or "
    "latency=1ms,stream=500MB/s, and total=20GB/s, opens=, p50=, p99=, read=8MB."
)
TIER, QUEUES = "A fast tier", "Simulation"


@opt.command(EPILOG)
def plan(
    data: Annotated[list[str], opt.argument("DATA...", "The dataset, or its sidecar.")],
    batch_size: int = opt.value("N", "Samples per step, rank.", "--batch-size", "-M", default=...),
    compute: str = opt.value("TIME", "What a step takes without I/O, such as 12ms.", default=...),
    storage: str = opt.value("FILE|NAME|FIGURES", STORAGE, default=...),
    nodes: int = opt.value("N", "How many there are.", default=1),
    ranks_per_node: int = opt.value("N", "Processes that read.", default=1),
    threads: int = opt.value("N", "That read for a rank.", default=4),
    buffer_size: str | None = opt.value("SIZE", "What is read at a time.", "--buffer-size", "-b"),
    tier: str | None = opt.value(
        "SIZE", "What the job may use of it on each node: plans mini-epochs.", panel=TIER
    ),
    epochs: int = opt.value(
        "N", "Of the training: S.", "--epochs", "-E", default=1, min=1, panel=TIER
    ),
    tier_rate: str | None = opt.value("RATE", "Of the tiers of all nodes together.", panel=TIER),
    simulate: bool = opt.switch("Simulate queues at targets.", "--simulate", panel=QUEUES),
    targets: int | None = opt.value(
        "N", "That hold the data (64; of one node: 1).", min=1, panel=QUEUES
    ),
    stagger: int | None = opt.value("N", "Ranks that read at a time.", min=1, panel=QUEUES),
    sidecar: opt.At = None,
    json: opt.Json = False,
) -> None:
    """Predict what a job needs from storage, and what it waits for.

    Nothing but the sidecar is read: a closed form on dsprep's own order of groups. A fast tier is
    planned by the model of Xu et al. (PDSW 2021), Eq. 1 with MIN in place of the MAX that is
    printed there, which contradicts the results of the paper.
    """
    from dsprep.bench.report import read_plan as words
    from dsprep.core.units import parse_nbytes, parse_rate, parse_seconds
    from dsprep.planning.published import parse_storage
    from dsprep.planning.waiting import Job
    from dsprep.verbs.plan_read import plan_read

    job = Job(nodes, ranks_per_node, batch_size, parse_seconds(compute), threads)
    tiers = None
    if tier is not None:
        rate = None if tier_rate is None else parse_rate(tier_rate)
        tiers = {"capacity": parse_nbytes(tier), "epochs": epochs, "fast": rate}
    made = plan_read(data, job, parse_storage(storage), buffer_size, tiers, sidecar)
    queues = made.simulated(targets, stagger) if simulate else {}
    if json:
        queued = {name: asdict(queue) for name, queue in queues.items()}
        print_json({**made.to_json(), "simulated": queued})
        return
    print_rows([*words.rows(made, queues).items()])
    say("")
    print_table(words.table(made))
    for line in made.notes:
        note(line)
