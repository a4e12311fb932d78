"""A dataset opened for reading: one file, many files, or files with a sidecar."""
