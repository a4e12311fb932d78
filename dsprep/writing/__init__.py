"""Writing datasets: plans, the copy loop, shuffling, resuming, publishing, and the sidecar."""
