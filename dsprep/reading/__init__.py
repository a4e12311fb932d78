"""Reading samples from a `FileLayout`: extents, ``preadv``, decoding. No format library.

`files`
    The open files of a dataset.
`read_plan`
    From extents to reads; `Sidecar.read` and the Reader share it.
`records`
    Fields that lie in records.
`each`
    Records of which each is in a file of its own.
`columns`
    Fields that are arrays.
`layout_reader`
    Both: the samples of one file.
"""
