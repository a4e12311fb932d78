"""Where the samples of one file lie, and how their stored bytes become values.

`model`
    The words: `Blocks`, `Records`, `Grid`, `Column`, `FileLayout`. A format fills them with what it
    finds; a sidecar keeps them.
`codec`
    Their JSON, checked when it is read.
`extents`
    From samples to byte ranges: `locate`.
`fitting`
    From the numbers that were found to the smallest laws that give them.
"""
