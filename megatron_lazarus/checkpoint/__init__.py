"""Checkpoints: which experts to write, snapshots, writing in the background, manifest, atomic publication, loading."""
