"""Where things live: the mesh, the table from logical names to mesh axes, the platform."""
