"""Feeding training: batches read ahead, group by group, by ``preadv`` at computed offsets.

`loader`, `options`, `setup`, `checks`, `states`
    `Reader`, the public class; its options and how it reads by them; what it checks, and what of a
    state that is loaded.
`order`, `units`
    Which samples a rank delivers, and when: pure. How much is read at a time.
`mini_epochs`, `adaptive`
    Parts of an epoch that are passed several times; who decides how often.
`cached`
    What is read from a copy on a faster tier, and which copies there are to be.
`ranks`, `defaults`
    Which process this is; how many threads read where nobody says.
`unit_plan`, `filling`
    What is read for a unit, and where; `dsprep.reading.read_plan` has what `Sidecar` shares. A unit
    on its way into memory.
`memory`
    Blocks that batches are views of.
`pipeline`, `transforming`
    The threads, and the steps of a loop; transforms at work.
`engines`
    Ways of reading bytes.
`node`
    Few processes of a node that read for all of its ranks; at most n that read at a time.
`ledger`
    What was done, and how long the consumer waited.
`adapters`
    What the adapters for frameworks share.
"""
