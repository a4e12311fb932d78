"""A copy of a dataset, or of a part of it, on a faster tier of storage: local disks, or memory.

`pieces`
    Where the bytes of groups are: pure.
`copies`
    One copy in a directory: what it holds, who uses it.
`folder`
    All copies: where they are, their size, and what is removed to make room.
`copier`
    Fills copies.

A copy has, for each file of the dataset, a sparse file of the same size in which some ranges have
been filled in, at the offsets that they have in the dataset: nothing has to be translated, and
whatever reads the dataset reads a copy. A copy is never truncated, and given up by removing its
files, so that what a reader has open stays as it is.

Sources: Xu et al., PDSW 2021, section III (mini-epochs on a fast tier); Pumma et al., "Scalable
Deep Learning via I/O Analysis and Optimization", section 6 (staging by provenance); Mohan et al.,
"Analyzing and Mitigating Data Stalls in DNN Training" (a cache that keeps what it has).
"""
