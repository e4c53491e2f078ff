"""Training a drafter: rows to batches, the training-time-test loss, the optimiser, exact resume."""
