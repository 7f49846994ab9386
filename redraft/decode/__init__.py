"""Decoding rules, one per file: from a pass's statistics and the canvas to the next canvas."""
