"""The official rule's own state and kernels: accept by the entropy bound, re-draw the rest, test for the end, count.

The torch reference is decode/entropy_bound.py. `finish_pass` does a step of it for every lane whose slot is not done,
one program a lane; `start_canvas` begins a canvas.

Position i is accepted when the entropies before it in sorted order sum to at most the bound. No sort is needed:

    before_i = sum of H_j over all j with (H_j, j) < (H_i, i)

where ties go by position (torch's sort leaves them open). The sum runs in fp64, as torch's cumsum of fp32 does on a
CPU, so its order does not show, and is rounded where the reference rounds. "The last k argmax canvases equal this one"
is kept as the number of passes since the argmax last changed, which is at least k in just that case.
"""

from dataclasses import dataclass
from typing import Self

import torch

from redraft.kernels.launch import INTERPRET, after_previous, early_launch, tl, triton
from redraft.kernels.philox import philox_words
from redraft.kernels.state import CONVERGED, OUT_OF_STEPS, Canvases, SlotState

_CONVERGED, _OUT_OF_STEPS = tl.constexpr(CONVERGED), tl.constexpr(OUT_OF_STEPS)
_CHUNK = tl.constexpr(8)  # positions compared with all others at a time: the last sum is over 8 threads of a warp


@dataclass
class EntropyBoundState:
    """Per-slot tensors [S]: a request's settings, and how long its argmax has stayed."""

    length: int  # of a canvas
    vocab: int
    max_steps: torch.Tensor  # int32
    stability: torch.Tensor  # int32
    equal: torch.Tensor  # int32, how many passes in a row left the argmax as it was
    # fp64, because the reference subtracts them before it rounds to fp32.
    t_min: torch.Tensor
    t_max: torch.Tensor
    entropy_bound: torch.Tensor  # fp32
    confidence_threshold: torch.Tensor  # fp32

    @classmethod
    def allocate(cls, slots: int, length: int, vocab: int, device: torch.device | str) -> Self:
        whole = [torch.ones(slots, dtype=torch.int32, device=device) for _ in range(3)]
        temperatures = [torch.ones(slots, dtype=torch.float64, device=device) for _ in range(2)]
        bounds = [torch.zeros(slots, device=device) for _ in range(2)]
        return cls(length, vocab, *whole, *temperatures, *bounds)


def finish_pass(
    draw: torch.Tensor, argmax: torch.Tensor, entropy: torch.Tensor, slots: torch.Tensor, state: SlotState,
    own: EntropyBoundState, canvases: Canvases,
) -> None:  # fmt: skip
    """Move the slot of every lane, slots int32 [W], by one pass, unless it is done.

    From the outputs of `sampling.sample`, all [W * C]. Re-drawn tokens are counter-based.
    """
    _finish_kernel[(slots.shape[0],)](
        draw, argmax, entropy, slots,
        canvases.tokens, canvases.argmax, canvases.entropy, canvases.accepted, canvases.status,
        state.seed, state.canvas_index, state.step, state.done, state.temperature,
        own.max_steps, own.stability, own.equal, own.t_min, own.t_max, own.entropy_bound, own.confidence_threshold,
        own.vocab, C=own.length, BLOCK_C=triton.next_power_of_2(max(own.length, 16)), num_warps=8,
        **early_launch(),
    )  # fmt: skip


def start_canvas(slots: torch.Tensor, state: SlotState, own: EntropyBoundState, canvases: Canvases) -> None:
    """Begin the next canvas of each slot in slots int32 [W]: random tokens, step 0."""
    _start_kernel[(slots.shape[0],)](
        slots, canvases.tokens, canvases.argmax, canvases.accepted, canvases.status,
        state.seed, state.canvas_index, state.step, state.done, state.temperature,
        own.max_steps, own.t_min, own.t_max,
        own.vocab, C=own.length, BLOCK_C=triton.next_power_of_2(own.length), num_warps=4,
    )  # fmt: skip


@triton.jit
def _temperature(step, max_steps, t_min, t_max):
    """decode.entropy_bound.temperature after `step` passes, every operation rounded to fp32."""
    share = ((max_steps - step).to(tl.float64) / max_steps.to(tl.float64)).to(tl.float32)
    return t_min.to(tl.float32) + _product((t_max - t_min).to(tl.float32), share)


@triton.jit
def _product(a, b):
    """fp32 a * b, which the compiler must not contract with a sum that follows."""
    if INTERPRET:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _random_tokens(seed, canvas, step, position, vocab):
    """sampling.random_tokens: canvas * 2 + REDRAW is the last counter word, and multiply-shift maps it to the range."""
    word, _, _, _ = philox_words(seed, tl.zeros_like(position), position, step, canvas * 2 + 1)
    return ((word.to(tl.uint64) * vocab) >> 32).to(tl.int64)


@triton.jit
def _store_status(status_ptr, slot, done, step, accepted, canvas, mask):
    tl.store(status_ptr + slot * 4, done, mask=mask)
    tl.store(status_ptr + slot * 4 + 1, step, mask=mask)
    tl.store(status_ptr + slot * 4 + 2, accepted, mask=mask)
    tl.store(status_ptr + slot * 4 + 3, canvas, mask=mask)


@triton.jit
def _sort_key(entropy, position):
    """int64 that orders as (entropy, position): a float's bits order as it does, once those below the sign of a
    negative one are turned over."""
    bits = entropy.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | position.to(tl.int64)


@triton.jit
def _entropy_before(entropy_ptr, mine, position, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """fp64 [BLOCK_C] sums of the C entropies that come before each of `mine`, which is at `position`.

    A thread adds what it compares to sums of its own, which are added across threads once. NaN, and infinity, which
    comes before none that is accepted, count as zero.
    """
    key = _sort_key(mine, position)[:, None]
    sums = tl.zeros((BLOCK_C, _CHUNK), tl.float64)
    zero = tl.zeros((1, 1), tl.float64)
    for start in tl.range(0, C, _CHUNK, loop_unroll_factor=4):
        j = start + tl.arange(0, _CHUNK)
        theirs = tl.load(entropy_ptr + j, mask=j < C, other=float("inf"))
        finite = tl.where(tl.abs(theirs) < float("inf"), theirs, 0.0).to(tl.float64)
        # Times one or zero: half the selections that choosing an fp64 number takes, and the product is part of the sum.
        sums += tl.where(_sort_key(theirs, j)[None, :] < key, zero + 1.0, zero) * finite[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _finish_kernel(
    draw_ptr, argmax_ptr, entropy_ptr, slots_ptr,
    tokens_ptr, kept_argmax_ptr, kept_entropy_ptr, accepted_ptr, status_ptr,
    seed_ptr, canvas_ptr, step_ptr, done_ptr, temperature_ptr,
    max_steps_ptr, stability_ptr, equal_ptr, t_min_ptr, t_max_ptr, bound_ptr, confidence_ptr,
    vocab, C: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    slot = tl.load(slots_ptr + lane)
    after_previous(EARLY)
    position = tl.arange(0, BLOCK_C)
    inside, lane_row, row = position < C, lane * C + position, slot * C + position
    # A slot takes as long as its loads, which a branch would let wait: one that is done computes and stores nothing.
    running = tl.load(done_ptr + slot) == 0
    entropy = tl.load(entropy_ptr + lane_row, mask=inside, other=0.0)
    argmax = tl.load(argmax_ptr + lane_row, mask=inside, other=0).to(tl.int64)
    draw = tl.load(draw_ptr + lane_row, mask=inside, other=0).to(tl.int64)
    previous = tl.load(kept_argmax_ptr + row, mask=inside, other=0)
    step, canvas, seed = tl.load(step_ptr + slot), tl.load(canvas_ptr + slot), tl.load(seed_ptr + slot)
    equal, stability = tl.load(equal_ptr + slot), tl.load(stability_ptr + slot)
    max_steps, bound = tl.load(max_steps_ptr + slot), tl.load(bound_ptr + slot)
    confidence = tl.load(confidence_ptr + slot)
    t_min, t_max = tl.load(t_min_ptr + slot), tl.load(t_max_ptr + slot)

    before = _entropy_before(entropy_ptr + lane * C, entropy, position, C, BLOCK_C)
    accepted = ((before + entropy.to(tl.float64)).to(tl.float32) - entropy <= bound) & inside
    redraw = _random_tokens(seed, canvas, step + 1, position, vocab)

    changed = tl.sum(((argmax != previous) & inside).to(tl.int32), 0) > 0
    equal = tl.where(changed | (step == 0), 0, equal + 1)
    mean = tl.sum(tl.where(inside, entropy.to(tl.float64), 0.0), 0).to(tl.float32) / C
    sure = (equal >= stability) & (mean < confidence)
    done = tl.where(sure, _CONVERGED, 0) | tl.where(step + 1 >= max_steps, _OUT_OF_STEPS, 0)

    tl.debug_barrier()  # every thread has read the slot's old state
    keep = inside & running
    tl.store(tokens_ptr + row, tl.where(accepted, draw, redraw), mask=keep)
    tl.store(kept_argmax_ptr + row, argmax, mask=keep)
    tl.store(kept_entropy_ptr + row, entropy, mask=keep)
    tl.store(accepted_ptr + row, accepted.to(tl.int8), mask=keep)
    tl.store(equal_ptr + slot, equal, mask=running)
    tl.store(step_ptr + slot, step + 1, mask=running)
    tl.store(done_ptr + slot, done, mask=running)
    tl.store(temperature_ptr + slot, _temperature(step + 1, max_steps, t_min, t_max), mask=running)
    _store_status(status_ptr, slot, done, step + 1, tl.sum(accepted.to(tl.int32), 0), canvas, running)


@triton.jit
def _start_kernel(
    slots_ptr, tokens_ptr, argmax_ptr, accepted_ptr, status_ptr,
    seed_ptr, canvas_ptr, step_ptr, done_ptr, temperature_ptr, max_steps_ptr, t_min_ptr, t_max_ptr,
    vocab, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots_ptr + tl.program_id(0))
    position = tl.arange(0, BLOCK_C)
    inside, row = position < C, slot * C + position
    canvas = tl.load(canvas_ptr + slot) + 1
    tokens = _random_tokens(tl.load(seed_ptr + slot), canvas, tl.zeros_like(position), position, vocab)
    max_steps, t_min, t_max = tl.load(max_steps_ptr + slot), tl.load(t_min_ptr + slot), tl.load(t_max_ptr + slot)
    first = _temperature(tl.zeros_like(canvas), max_steps, t_min, t_max)
    tl.debug_barrier()  # every thread has read the slot's old state
    tl.store(tokens_ptr + row, tokens, mask=inside)
    tl.store(argmax_ptr + row, tokens, mask=inside)
    tl.store(accepted_ptr + row, tl.zeros((BLOCK_C,), tl.int8), mask=inside)
    tl.store(canvas_ptr + slot, canvas)
    tl.store(step_ptr + slot, 0)
    tl.store(done_ptr + slot, 0)
    tl.store(temperature_ptr + slot, first)
    _store_status(status_ptr, slot, 0, 0, 0, canvas, True)
