"""Checkpoints that are verified when read, and parameter exchange as safetensors."""
