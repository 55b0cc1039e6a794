"""What a row is for: an answer to learn, a document, a prompt, a preference, a sealed sample."""
