"""The files of other frameworks, read into keys."""
