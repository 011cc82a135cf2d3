"""Collectives where the lab needs them: several ranks on one GPU, torch.distributed, ghost ranks."""
