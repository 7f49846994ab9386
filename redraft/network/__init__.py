"""The network: weights, arena, the plain specification and the fused passes."""
