"""Reading samples from a `FileLayout`: extents, ``preadv``, decoding. No format library.

`files`
    The open files of a dataset.
`records`
    Fields that lie in records.
`columns`
    Fields that are arrays.
`layout_reader`
    Both: the samples of one file.
"""
