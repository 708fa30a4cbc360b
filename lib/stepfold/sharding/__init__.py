"""Meshes, sharding rules, and the placement of arrays."""
