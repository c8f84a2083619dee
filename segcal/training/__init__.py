"""The skeleton of a training run: experiments, checkpoints, logs, collapse."""
