"""Training: entry point, loop, checkpoints, run folder, tracking, export."""
