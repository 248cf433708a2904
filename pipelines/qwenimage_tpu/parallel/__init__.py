"""The torch pipeline over several processes, one per device: torch.distributed and DTensor."""
