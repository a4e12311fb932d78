"""Laboratories: what is run by hand, for long or with rights that a test must not need.

`cluster`: a cluster on one machine, with file systems and schedulers. `adversarial`: random trials
that look for wrong data, crashes, hangs and leaks. Each has a README.
"""
