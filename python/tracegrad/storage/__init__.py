"""Read and write files: local and remote, safetensors, manifests and locks, the folder of a run."""
