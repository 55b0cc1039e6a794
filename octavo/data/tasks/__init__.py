"""Parsers and encoders of rows by task: documents, prompts, preferences, sealed samples; and data sets as sources."""
