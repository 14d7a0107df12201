"""What strategies over torch.distributed share: the process group, collectives, and their base class."""
