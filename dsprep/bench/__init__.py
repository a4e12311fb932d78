"""Benchmarks: what each way of reading costs here, and how far it is from the limit.

`strategies`
    One file per way of reading; the table of them is in its ``__init__``.
`task`
    What one process is to run, as it travels to it.
`child`
    That process: opens, runs epochs, counts, checks what was delivered.
`running`, `gate`, `mpi`, `orphan`
    Starting such processes, here or as ranks of an MPI job, and keeping them in step; that they do
    not outlive who started them.
`scratch`
    The dataset in the form that a strategy needs.
`sums`, `counters`, `computing`, `caches`, `results`
    Checksums of what came; what the kernel counted; the step's computation; the page cache;
    all of it as it travels back.
`model`
    Rows, reports and their measures: what every output is made of.
`summary`, `sweeping`, `answer`, `comparing`
    From counts to rows; the knee of a sweep; the closing words; two reports side by side: pure.
`reading`
    ``dsprep bench read``.
`tables`, `page`, `machine`
    CSV and tables; the HTML page; what the machine is.
"""
