"""Train the demo checkpoint: `python -m recipes.demo.train --out DIR --minutes 16`.

Each step encodes a batch of whole rows causally, denoises one canvas of each row from uniform noise at a random ratio,
and adds two losses: cross-entropy of the clean canvas at every position, and next-token cross-entropy of the encoder.
Weights are BF16 as they will be used, with fp32 masters in the optimizer. Only transformers' own model class is used.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerBase
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

from recipes.demo import tokenizer as demo_tokenizer
from recipes.demo.data import CANVAS, ROW, Batch, stream
from recipes.demo.layers import DENSE_EXPERTS, PrefixCache, decoder_masks, embed_by_product, encoder_masks
from recipes.demo.measure import measure
from recipes.demo.optim import MasterOptimizer

STATE_FILE = "training_state.safetensors"
PAD_WEIGHT = 0.1  # padding after the answer is easy and would drown the rest
PROMPT_WEIGHT = 0.1  # next-token loss inside the prompt, mostly noise
ENCODER_WEIGHT = 0.3
WARM_UP_STEPS = 200
# The two sides' layer scalars differ on purpose: a program that mixes them up must not get away with it.
DECODER_SCALARS = (1.0, 0.9375, 1.0, 0.96875, 1.0, 1.0)
ENCODER_SCALARS = (0.96875, 1.0, 0.9375, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of one training run."""

    rows: int = 512
    minutes: float = 16.0
    max_steps: int = 10**9
    decay_from: float = 0.45  # share of the time after which the learning rates fall linearly to zero
    workers: int = 10
    lr_matrix: float = 0.015  # Muon
    lr_other: float = 2e-3  # AdamW
    seed: int = 0
    compiled: bool = True


def model_config(vocab_size: int, tiny: bool = False) -> DiffusionGemmaConfig:
    """The demo architecture (12.7 M parameters), or a very small one of the same kind for tests."""
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128 if tiny else 256,
        "intermediate_size": 64 if tiny else 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if tiny else 64,
        "global_head_dim": 64 if tiny else 128,
        "num_global_key_value_heads": 1,
        "num_experts": 4 if tiny else 16,
        "top_k_experts": 2 if tiny else 4,
        "moe_intermediate_size": 64 if tiny else 128,
        "sliding_window": 128,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "position_embedding_size": 16,
    }
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS)


def generation_config(tokenizer: PreTrainedTokenizerBase) -> DiffusionGemmaGenerationConfig:
    """DiffusionGemma's published sampler settings with the demo's own token ids."""
    return DiffusionGemmaGenerationConfig(
        sampler_config={"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
        t_max=0.8,
        t_min=0.4,
        max_denoising_steps=48,
        stability_threshold=1,
        confidence_threshold=0.005,
        max_new_tokens=256,
        eos_token_id=[
            tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids(demo_tokenizer.TURN_END),
        ],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def build_model(
    tokenizer: PreTrainedTokenizerBase, device: torch.device, tiny: bool = False
) -> DiffusionGemmaForBlockDiffusion:
    """A freshly initialised model in BF16 with fp32 rotary tables, as loading a BF16 checkpoint gives."""
    model: Any = DiffusionGemmaForBlockDiffusion(model_config(len(tokenizer), tiny))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # attention scale is 1: the norms carry head_dim**-0.5
            torch.nn.init.constant_(parameter, parameter.numel() ** -0.25)
        elif name.endswith("router.scale"):  # the router divides by sqrt(hidden): start with distinct experts
            torch.nn.init.constant_(parameter, 4.0)
        elif name.endswith("per_expert_scale"):  # constants: the gradient of a few often repeated entries is slow
            parameter.data = 1 + (torch.arange(parameter.numel()) % 3 - 1) / 16
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.requires_grad_("vision" not in name and not name.endswith("per_expert_scale"))
    sides = ((model.model.decoder, DECODER_SCALARS), (model.model.encoder.language_model, ENCODER_SCALARS))
    for side, scalars in sides:
        for layer, scalar in zip(side.layers, scalars, strict=True):
            layer.layer_scalar.data = torch.tensor([scalar], dtype=torch.bfloat16)
    model.generation_config = generation_config(tokenizer)
    return model.to(device)


@dataclass(frozen=True)
class Noise:
    """Random inputs of one step; `half` rows condition on the model's own earlier guess."""

    canvas: Tensor  # int64 [B, CANVAS], the noisy canvas to denoise
    earlier: Tensor  # int64 [half, CANVAS], a noisier version that gives the self-conditioning logits
    temperature: Tensor  # float32 [half, 1, 1]


def draw_noise(clean: Tensor, vocab_size: int) -> Noise:
    """Replace each token of `clean` [B, CANVAS] by a uniform one with a probability stratified over the batch."""
    rows, half, device = len(clean), len(clean) // 2, clean.device
    strata = (torch.arange(rows, device=device) + torch.rand(rows, device=device)) / rows
    ratio = (1.12 * strata[torch.randperm(rows, device=device)]).clamp(max=1.0)  # one row in nine is pure noise
    threshold = torch.rand(clean.shape, device=device)
    random_tokens = torch.randint(vocab_size, clean.shape, device=device)
    canvas = torch.where(threshold < ratio[:, None], random_tokens, clean)
    more = ratio[:half] + (1 - ratio[:half]) * torch.rand(half, device=device)
    earlier = torch.where(threshold[:half] < more[:, None], torch.randint_like(canvas[:half], vocab_size), clean[:half])
    return Noise(canvas, earlier, 0.4 + 0.4 * torch.rand(half, 1, 1, device=device))


class Losses:
    """The training forward pass over transformers' modules; an instance is what `torch.compile` compiles."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.encoder, self.decoder = model.model.encoder.language_model, model.model.decoder
        self.head, self.softcap = model.lm_head, model.final_logit_softcapping
        text_config: Any = model.config.text_config
        self.window = text_config.sliding_window
        names = inspect.signature(type(self.decoder).forward).parameters
        self.cache_key = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.24

    def __call__(
        self, tokens: Tensor, prompt: Tensor, end: Tensor, start: Tensor, clean: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """(denoising loss, encoder loss), both scalars. tokens int64 [B, ROW]; prompt, end, start int64 [B]."""
        cache = PrefixCache([])
        index = torch.arange(ROW, device=tokens.device)[None]
        encoded = self.encoder(
            input_ids=tokens,
            attention_mask=encoder_masks(self.window, tokens.device),
            position_ids=index,
            **{self.cache_key: cache},
        ).last_hidden_state
        encoder_loss = self._encoder_loss(encoded, tokens, prompt, end)
        logits = self._denoise(cache, start, noise)
        positions = start[:, None] + torch.arange(CANVAS, device=start.device)
        weight = torch.where(positions <= end[:, None], 1.0, PAD_WEIGHT)
        return self._cross_entropy(logits, clean, weight), encoder_loss

    def _denoise(self, cache: PrefixCache, start: Tensor, noise: Noise) -> Tensor:
        half = len(noise.earlier)
        masks = decoder_masks(start, self.window)
        with torch.no_grad():
            half_masks = {kind: mask[:half] for kind, mask in masks.items()}
            earlier = self._decode(noise.earlier, cache.head(half), start[:half], half_masks)
            conditioning = (earlier / noise.temperature).to(torch.bfloat16)
            conditioning = F.pad(conditioning, (0, 0, 0, 0, 0, len(start) - half))
        mask = torch.arange(len(start), device=start.device) < half
        return self._decode(noise.canvas, cache, start, masks, conditioning, mask)

    def _decode(
        self,
        canvas: Tensor,
        cache: PrefixCache,
        start: Tensor,
        masks: dict[str, Tensor],
        conditioning: Tensor | None = None,
        conditioning_mask: Tensor | None = None,
    ) -> Tensor:
        hidden = self.decoder(
            decoder_input_ids=canvas,
            self_conditioning_logits=conditioning,
            self_conditioning_mask=conditioning_mask,
            decoder_attention_mask=masks,
            decoder_position_ids=start[:, None] + torch.arange(CANVAS, device=start.device),
            **{self.cache_key: cache},
        ).last_hidden_state
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.head(hidden).float() / self.softcap) * self.softcap

    def _encoder_loss(self, encoded: Tensor, tokens: Tensor, prompt: Tensor, end: Tensor) -> Tensor:
        index = torch.arange(1, ROW, device=tokens.device)[None]
        weight = torch.where(index < prompt[:, None], PROMPT_WEIGHT, 1.0) * (index <= end[:, None])
        return self._cross_entropy(self._logits(encoded[:, :-1]), tokens[:, 1:], weight)

    @staticmethod
    def _cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum()


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(tokens, prompt, end, start, clean canvas), all int64."""

    def move(array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        return tensor.long()

    tokens, prompt, end, start = (move(a) for a in (batch.tokens, batch.prompt, batch.end, batch.start))
    clean = tokens.gather(1, start[:, None] + torch.arange(CANVAS, device=device))
    return tokens, prompt, end, start, clean


def rate(step: int, progress: float, decay_from: float) -> float:
    """Learning-rate factor: warm-up, constant, linear to zero at progress 1."""
    fall = min(1.0, (1.0 - progress) / (1.0 - decay_from))
    return max(0.0, min((step + 1) / WARM_UP_STEPS, fall))


class Trainer:
    """One run: data in, losses down, checkpoint out."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, tokenizer_dir: Path, recipe: Recipe, out: Path) -> None:
        self.model, self.recipe, self.out = model, recipe, out
        self.device = model.device
        self.text_config: Any = model.config.text_config
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self.batches: Iterator[Batch] = stream(tokenizer_dir, recipe.rows, recipe.workers, recipe.seed)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = MasterOptimizer(parameters, recipe.lr_matrix, recipe.lr_other)
        self.losses = Losses(model)
        self.step = 0
        self.compute = torch.compile(self.losses.__call__, dynamic=False) if recipe.compiled else self.losses.__call__
        for side in (model.model.encoder.language_model, model.model.decoder):
            embed_by_product(side.embed_tokens)

    def run(self, measure_every: float = 120.0) -> None:
        """Train until the time or the steps are used up; measure on the way; save at the end."""
        torch.manual_seed(self.recipe.seed)
        self._train_step(0.0)  # compiling does not count as training time
        started = logged = time.monotonic()
        next_measure = measure_every
        while self.step < self.recipe.max_steps:
            elapsed = time.monotonic() - started
            progress = max(elapsed / (60 * self.recipe.minutes), self.step / self.recipe.max_steps)
            if progress >= 1:
                break
            values = self._train_step(progress)
            if self.step % 100 == 0:
                denoise, encoder = (float(v) for v in values)
                speed = 100 / (time.monotonic() - logged)
                logged = time.monotonic()
                log(step=self.step, seconds=round(elapsed), denoise=denoise, encoder=encoder, steps_per_s=speed)
            if elapsed > next_measure:
                next_measure += measure_every
                self.measure(64)
                self.save()
        self.save()

    def _train_step(self, progress: float) -> tuple[Tensor, Tensor]:
        self.text_config._experts_implementation = DENSE_EXPERTS
        tokens, prompt, end, start, clean = to_device(next(self.batches), self.device)
        noise = draw_noise(clean, self.text_config.vocab_size)
        denoise, encoder = self.compute(tokens, prompt, end, start, clean, noise)
        (denoise + ENCODER_WEIGHT * encoder).backward()
        self.optimizer.step(rate(self.step, progress, self.recipe.decay_from))
        self.step += 1
        return denoise.detach(), encoder.detach()

    def measure(self, count: int) -> None:
        """Held-out accuracy per task with the averaged weights and the official sampler."""
        self.optimizer.set_ema(True)
        self.text_config._experts_implementation = "grouped_mm"
        began = time.monotonic()
        for row in measure(self.model, self.tokenizer, count):
            log(**row)
        log(measured_in=time.monotonic() - began)
        self.optimizer.set_ema(False)

    def save(self) -> None:
        """The checkpoint with averaged weights, and the current masters (as BF16) to resume from."""
        self.optimizer.set_ema(True)
        self.text_config._experts_implementation = "grouped_mm"
        save_checkpoint(self.model, self.tokenizer, self.out)
        names, masters = self.optimizer.names, self.optimizer.master
        state = {n: m.to(torch.bfloat16).cpu().contiguous() for n, m in zip(names, masters, strict=True)}
        save_file(state, self.out / STATE_FILE, metadata={"steps": str(self.step)})
        self.optimizer.set_ema(False)


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that every transformers since 5.12 loads: nothing in it but what the oldest can read."""
    model.save_pretrained(folder)
    demo_tokenizer.save(tokenizer, folder)
    full = model.config.text_config.per_layer_config["full_attention"]
    older = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_key_value_heads}

    def readable_config(config: dict[str, Any]) -> None:
        config["text_config"] |= older
        config["vision_config"].pop("rope_parameters", None)  # of a type 5.12 does not know; the default of each

    _edit_json(folder / "config.json", readable_config)
    _edit_json(folder / "generation_config.json", lambda config: config.pop("return_dict_in_generate", None))


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def log(**values: Any) -> None:
    """One line of JSON."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}), flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="training time after compilation")
    parser.add_argument("--max-steps", type=int, default=Recipe.max_steps)
    parser.add_argument("--rows", type=int, default=Recipe.rows, help="batch size")
    parser.add_argument("--workers", type=int, default=Recipe.workers, help="data processes; 0 makes data in-line")
    parser.add_argument("--decay-from", type=float, default=Recipe.decay_from)
    parser.add_argument("--lr-matrix", type=float, default=Recipe.lr_matrix, help="peak learning rate of Muon")
    parser.add_argument("--lr-other", type=float, default=Recipe.lr_other, help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer instead of training one")
    parser.add_argument("--resume", type=Path, help=f"folder with {STATE_FILE} of an earlier run")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the code")
    parser.add_argument("--measure", type=int, default=500, help="held-out items per task measured at the end")
    parser.add_argument("--measure-every", type=float, default=120.0, help="seconds between short measurements")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer_dir = args.tokenizer or args.out
    if args.tokenizer is None:
        demo_tokenizer.save(demo_tokenizer.build(), args.out)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = build_model(tokenizer, device, args.tiny)
    log(parameters=sum(p.numel() for p in model.parameters()), device=str(device), torch=torch.__version__)
    recipe = Recipe(
        rows=args.rows,
        minutes=args.minutes,
        max_steps=args.max_steps,
        decay_from=args.decay_from,
        workers=args.workers,
        lr_matrix=args.lr_matrix,
        lr_other=args.lr_other,
        seed=args.seed,
        compiled=not args.no_compile,
    )
    trainer = Trainer(model, tokenizer_dir, recipe, args.out)
    if args.resume:
        trainer.optimizer.load_master(load_file(args.resume / STATE_FILE, device=str(device)))
    trainer.run(args.measure_every)
    log(steps=trainer.step)
    if args.measure:
        trainer.measure(args.measure)


if __name__ == "__main__":
    main()
