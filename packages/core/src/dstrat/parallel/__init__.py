"""Base of strategies over torch.distributed: process group and collectives."""
