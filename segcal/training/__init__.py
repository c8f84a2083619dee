"""What all trainers share: experiments, checkpoints, logs, and watching for collapse."""
