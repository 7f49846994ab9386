"""The demo model's optimizer: fp32 master copies of BF16 weights, Muon for matrices, AdamW for the rest, and an EMA.

Muon (K. Jordan et al., 2024) replaces a matrix's momentum by its nearest orthogonal matrix, found by a Newton-Schulz
iteration. A stack of expert matrices counts as separate matrices.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic of the Muon paper


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrix of each [N, rows, cols] with rows <= cols, in BF16; singular values end near 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not any(part in name for part in ("embed_tokens", "router", "vision"))


class MasterOptimizer:
    """Steps fp32 masters from BF16 gradients and writes the BF16 weights back.

    `set_ema(True)` shows the averaged weights to the model, `set_ema(False)` the current ones.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        lr_matrix: float,
        lr_other: float,
        matrix_decay: float = 0.01,
        momentum: float = 0.95,
        ema_decay: float = 0.999,
    ) -> None:
        self.params: list[Tensor] = list(named.values())
        self.names = list(named)
        self.master = [p.detach().float().clone() for p in self.params]
        self.ema = [m.clone() for m in self.master]
        self.lr_matrix, self.lr_other, self.matrix_decay = lr_matrix, lr_other, matrix_decay
        self.momentum, self.ema_decay, self.updates = momentum, ema_decay, 0
        matrix = [_is_matrix(n, p) for n, p in named.items()]
        self.matrix_ids = [i for i, m in enumerate(matrix) if m]
        self.other_ids = [i for i, m in enumerate(matrix) if not m]
        self.velocity = [torch.zeros_like(self.master[i]) for i in self.matrix_ids]
        others = [self.master[i] for i in self.other_ids]
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=lr_other, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates times `scale`; clears the gradients."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.params]
        self._adam_step([grads[i] for i in self.other_ids], scale)
        self._muon_step([grads[i].float() for i in self.matrix_ids], scale)
        torch._foreach_copy_(self.params, self.master)
        self.updates += 1
        decay = min(self.ema_decay, self.updates / (self.updates + 10))
        torch._foreach_lerp_(self.ema, self.master, 1 - decay)
        for p in self.params:
            p.grad = None

    def _adam_step(self, grads: list[Tensor], scale: float) -> None:
        for index, grad in zip(self.other_ids, grads, strict=True):
            self.master[index].grad = grad.float()
        for group in self.adam.param_groups:
            group["lr"] = self.lr_other * scale
        self.adam.step()

    def _muon_step(self, grads: list[Tensor], scale: float) -> None:
        torch._foreach_lerp_(self.velocity, grads, 1 - self.momentum)
        torch._foreach_lerp_(grads, self.velocity, self.momentum)  # Nesterov
        stacks: dict[tuple[int, ...], list[tuple[int, Tensor, bool]]] = defaultdict(list)
        for index, update in zip(self.matrix_ids, grads, strict=True):
            flat = update.reshape(-1, *_matrix_shape(self.names[index], update))
            tall = flat.shape[-2] > flat.shape[-1]
            wide = flat.mT if tall else flat
            stacks[tuple(wide.shape[-2:])].append((index, wide, tall))
        lr = self.lr_matrix * scale
        for members in stacks.values():
            updates = orthogonalize(torch.cat([wide for _, wide, _ in members]))
            for (index, wide, tall), part in zip(members, updates.split([len(w) for _, w, _ in members]), strict=True):
                direction = (part.mT if tall else part).reshape(self.master[index].shape)
                gain = (wide.shape[-1] / wide.shape[-2]) ** 0.5 if tall else 1.0
                self.master[index].mul_(1 - lr * self.matrix_decay).add_(direction, alpha=-lr * gain)

    @torch.no_grad()
    def set_ema(self, on: bool) -> None:
        torch._foreach_copy_(self.params, self.ema if on else self.master)

    @torch.no_grad()
    def load_master(self, tensors: dict[str, Tensor]) -> None:
        """Continue from saved masters; moments and average start anew."""
        for name, master, ema in zip(self.names, self.master, self.ema, strict=True):
            master.copy_(tensors[name])
            ema.copy_(master)
        torch._foreach_copy_(self.params, self.master)


def _matrix_shape(name: str, tensor: Tensor) -> tuple[int, int]:
    """Shape of one matrix: a fused gate/up tensor holds two of them."""
    rows, cols = tensor.shape[-2:]
    return (rows // 2, cols) if name.endswith("gate_up_proj") else (rows, cols)
