"""What a run keeps in its workdir: checkpoints, metrics, pictures, command and timeline files, versions."""
