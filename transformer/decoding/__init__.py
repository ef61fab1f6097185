"""Text generation: sampling, beam search, and generation from text to text."""
