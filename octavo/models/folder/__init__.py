"""The files of a Hugging Face folder (config.json, weights, tokenizer, template), opened and checked before a model is
built."""
