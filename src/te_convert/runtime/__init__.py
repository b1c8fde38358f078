"""What this machine has: torch, CUDA, Transformer Engine; which backend to use."""
