"""A background process that fetches and decodes row groups: `client` in the training process, `worker` in the other.

The worker process imports only `worker`, which neither imports `client` nor torch.
"""
