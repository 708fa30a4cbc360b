"""Compile a step ahead of time, and report its FLOPs, memory and communication."""
