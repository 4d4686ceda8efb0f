"""A run in its workdir: start or continuation, processes that follow, evaluation, checkpoints."""
