"""Sidecars: what they say, the identity of the files beside them, and reading through them."""
