"""A run in its workdir: planned, begun or continued, followed by other hosts, evaluated, saved."""
