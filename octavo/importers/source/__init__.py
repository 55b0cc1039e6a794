"""Reads the files of other frameworks into keys."""
