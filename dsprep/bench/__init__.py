"""Benchmarks: what each way of reading costs here, and how far it is from the limit.

`reading`
    ``dsprep bench read``: plans, prepares, runs all in turn.
`strategies`
    Ways of reading, a class each; the table of them is in its ``__init__``.
`scratch`
    The dataset in the form that a strategy needs.
`task`, `running`, `child`
    What one process is to run and what it measured; starting such processes, here or as ranks of
    an MPI job, and keeping them in step; the process itself.
`sums`, `counters`, `caches`, `received`, `evidence`
    Checksums of what came; what the kernel counted; the page cache; the network; what shows that
    a run was cold.
`summary`, `report`
    From counts to rows; from rows to tables, words and pages.
`machine`
    What the machine is.
"""
