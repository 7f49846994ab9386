"""Kernels as `redraft bench kernels` and `redraft tune kernels` see them: one file per file of kernels/."""
