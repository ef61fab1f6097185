"""Text to batches: corpora, sources, split, tokenizer, token store, objectives, batching."""
