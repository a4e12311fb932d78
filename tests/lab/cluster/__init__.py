"""A cluster on one machine: nodes, schedulers and file systems, to try dsprep on."""
