"""Laboratories: what is run by hand, for long or with rights that a test must not need.

`cluster`: a cluster on one machine, with file systems and schedulers. `adversarial`: damaged files
at random. Each has a README. `stores`: object stores that others wrote. `predictions`: what
``dsprep plan`` says beside what ``bench read`` measures.
"""
