"""What ``megamoe verify`` runs: do kernels compute the right thing here, and how fast."""
