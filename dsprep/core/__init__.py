"""Values and bytes: schemas and batches, reads and writes that are whole or fail, checksums."""
