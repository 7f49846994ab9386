"""Checkpoints on disk: finding, reading and writing them, one file per format."""
