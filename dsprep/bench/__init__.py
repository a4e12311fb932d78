"""Benchmarks: what each way of reading costs here, and how far it is from the limit.

`strategies`
    One file per way of reading; the table of them is in its ``__init__``.
`task`
    What one process is to run, as it travels to it.
`child`
    That process: opens, runs epochs, counts, checks what was delivered.
`running`
    Starting such processes, keeping them in step, dropping the page cache.
`scratch`
    The dataset in the form that a strategy needs.
`sums`, `counters`, `computing`, `caches`
    Checksums of what came; what the kernel counted; the step's computation; the page cache.
`model`
    Rows, reports and their measures: what every output is made of.
`summary`, `sweeping`, `answer`, `comparing`
    From counts to rows; the knee of a sweep; the closing words; two reports side by side: pure.
`reading`, `copying`
    ``dsprep bench read``; ``dsprep bench convert``, ``repack`` and ``provenance``.
`tables`, `page`, `machine`
    CSV and tables; the HTML page; what the machine is.
"""
