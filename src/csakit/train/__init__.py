"""`csakit train`: settings, text, batches, stages, checkpoints and log of a training run."""
