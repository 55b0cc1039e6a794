"""Rollouts by replicas of the generation engine in other processes, on this machine or on others (Ray)."""
