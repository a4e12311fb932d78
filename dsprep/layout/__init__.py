"""The locations of the samples of one file, and how their stored bytes become values.

`model`
    The words: `Blocks`, `Records`, `Grid`, `Column`, `FileLayout`. A format fills them with what it
    finds; a sidecar keeps them.
`as_json`
    Their JSON, checked when it is read.
`locate`, `plain`
    From samples to byte ranges; which fields are one plain range of every sample.
`fit`
    From the numbers that were found to the smallest laws that give them.
`describe`
    How a field is stored and what a read of one sample takes, in words.
"""
