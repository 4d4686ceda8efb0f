"""Programs on device meshes: sampling, training and the shardings of their arrays."""
