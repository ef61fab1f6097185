"""The data pipeline: corpora, sources, splits, tokenizers, token stores, objectives, batches."""
