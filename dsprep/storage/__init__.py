"""Files and their places: reading and writing ranges, listing, locking, replacing them at once."""
