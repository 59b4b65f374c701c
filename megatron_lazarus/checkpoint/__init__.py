"""Checkpoints: expert records, manifest, atomic publication."""
