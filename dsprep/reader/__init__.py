"""Feeding training: batches read ahead, group by group, by ``preadv`` at computed places.

`loader`
    `Reader`, the public class.
`order`
    Which samples a rank delivers, and when: pure.
`ranges`, `units`, `ranks`
    What is read at a time; which process this is.
`filling`, `fills`, `lines`, `cutting`
    From samples to reads and places; what is under way; the short way for samples that lie
    evenly; ranges cut for threads and calls.
`memory`
    Blocks that batches are views of.
`pipeline`
    The threads.
`engines`, `defaults`
    Ways of reading bytes; how many threads read where nobody says.
`node`, `tokens`
    Few processes of a node that read for all of its ranks; at most n that read at a time.
`dealing`
    What the ranks of a job have in common.
`ledger`
    What was done, and how long the consumer waited.
"""
