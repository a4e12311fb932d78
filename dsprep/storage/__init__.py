"""Where files are: reading and writing ranges, listing, locking, replacing them at once."""
