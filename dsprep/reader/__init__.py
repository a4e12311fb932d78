"""Feeding training: batches read ahead, group by group, by ``preadv`` at computed places.

`loader`
    `Reader`, the public class.
`order`
    Which samples a rank delivers, and when: pure.
`ranges`, `units`, `ranks`
    What is read at a time; which process this is.
`filling`, `lines`
    From samples to reads and places; the short way for samples that lie evenly.
`memory`
    Blocks that batches are views of.
`pipeline`
    The threads.
`engines`
    Ways of reading bytes.
`ledger`
    What was done, and how long the consumer waited.
"""
