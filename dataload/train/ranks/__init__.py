"""The ranks of a training run: their process group, what they exchange, and a model in DDP or FSDP."""
