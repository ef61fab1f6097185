"""Feed-forwards, used only through the interface of `FeedForward`. To add one, add a file."""
