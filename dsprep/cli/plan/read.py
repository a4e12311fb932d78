"""``dsprep plan read``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from dsprep.cli import options as opt
from dsprep.cli.bench.output import check_page, write
from dsprep.cli.report import note, print_json, print_rows, print_table, say

EPILOG = """
dsprep plan read x.h5 --nodes 1000 --ranks-per-node 8 -M 64 --compute 12ms \\
    --storage storage.json --html plan.html

dsprep plan read x.h5 --nodes 8 -M 32 --compute 50ms --storage cori

dsprep plan read x.h5 --nodes 64 -M 2 --compute 129ms --simulate \\
    --storage latency=1ms,stream=500MB/s,total=20GB/s

Exit status: 0 done, 1 bad data, 2 wrong usage.
"""

STORAGE = (
    "What bench storage wrote; cori, summit, cori-lustre or lmdbio; or "
    "latency=1ms,stream=500MB/s, and total=20GB/s, opens=, p50=, p99=, read=8MB."
)
TIER, QUEUES = "A fast tier", "Simulation"


@opt.command(EPILOG)
def plan_read(
    data: Annotated[list[str], opt.argument("DATA...", "The dataset, or its sidecar.")],
    batch_size: int = opt.value("N", "Samples per step, rank.", "--batch-size", "-M", default=...),
    compute: str = opt.value("TIME", "What a step takes without I/O, such as 12ms.", default=...),
    storage: str = opt.value("FILE|NAME|FIGURES", STORAGE, default=...),
    nodes: int = opt.value("N", "How many there are.", default=1),
    ranks_per_node: int = opt.value("N", "Processes that read.", default=1),
    threads: int = opt.value("N", "That read for a rank.", default=4),
    buffer_size: str | None = opt.value("SIZE", "What is read at a time.", "--buffer-size", "-b"),
    capacity: str | None = opt.value("SIZE", "Of each node, for the job.", panel=TIER),
    epochs: int = opt.value(
        "N", "Of the training.", "--epochs", "-E", default=1, min=1, panel=TIER
    ),
    simulate: bool = opt.switch("Simulate queues at targets.", "--simulate", panel=QUEUES),
    targets: int | None = opt.value(
        "N", "That hold the data (64; of one node: 1).", min=1, panel=QUEUES
    ),
    stagger: int | None = opt.value("N", "Ranks that read at a time.", min=1, panel=QUEUES),
    sidecar: opt.At = None,
    json: opt.Json = False,
    html: Path | None = opt.value("FILE", "Write a page for a browser, with plots."),
    overwrite: bool = opt.switch("Replace FILE.", "--overwrite"),
) -> None:
    """Predict what a job needs from storage, and what it will wait for.

    Nothing but the sidecar is read: a closed form on dsprep's own order of groups.
    """
    from dsprep.bench.report import read_plan as page
    from dsprep.core.units import parse_nbytes, parse_seconds
    from dsprep.planning.published import parse_storage
    from dsprep.planning.waiting import Job
    from dsprep.verbs import plan_read as verb

    check_page(html, overwrite)
    job = Job(nodes, ranks_per_node, batch_size, parse_seconds(compute), threads)
    tier = None if capacity is None else verb.FastTier(parse_nbytes(capacity), epochs)
    how = buffer_size, tier, sidecar
    plan = verb.plan_read(data, job, parse_storage(storage), *how)
    queues = plan.simulated(targets, stagger) if simulate else {}
    rows = page.rows(plan, queues)
    if json:
        queued = {name: asdict(queue) for name, queue in queues.items()}
        print_json({**plan.to_json(), "simulated": queued})
    else:
        print_rows([*rows.items()])
        say("")
        print_table(page.table(plan))
        for words in plan.notes:
            note(words)
    if html is not None:
        write(html, page.html(plan, Path(data[0]).name, rows))
