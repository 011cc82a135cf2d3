"""The collectives of the lab: several NCCL ranks on one GPU, torch.distributed, ghost ranks."""
