"""Models that all ranks train: DDP, FSDP2, and checks for gradients that DDP doesn't average."""
