"""Kernels as `redraft bench kernels` and `redraft tune kernels` see them, by what part of a pass they are for."""
