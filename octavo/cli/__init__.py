"""The command line: one file a command, imported when it is invoked, so that help and refusals come at once."""
