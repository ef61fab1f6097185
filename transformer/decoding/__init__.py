"""The key/value cache's users: sampling, beam search, and text in, text out."""
