"""Samples that a function makes of items: parts on disk, by whatever workers, then a source."""
