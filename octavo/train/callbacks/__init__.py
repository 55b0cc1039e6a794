"""What watches a run from outside: metrics, checkpoints, evaluation, health, trackers."""
