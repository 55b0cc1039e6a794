"""Tasks that rows are used for: conversations, documents, prompts, preferences, sealed samples."""
