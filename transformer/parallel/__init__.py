"""The device mesh, the rules from logical names to mesh axes, platform checks and processes."""
