"""What a run's files say: figures, intervals, and claims judged by them. No pictures."""
