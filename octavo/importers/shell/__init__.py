"""The grammar of launch scripts, and what their words evaluate to; nothing of configurations."""
