"""A run in its workdir: planning, start or continuation, processes that follow, evaluation, checkpoints."""
