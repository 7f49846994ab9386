"""Tier `turbo` inside transformers: the engine's answers from `generate`, and stock ones where it knows no better."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import same_bits
import torch
from adapters import peft_model
from parity import _Drafts
from same_bits import Run, assert_same_bits, from_pretrained, load, same
from tiny import tiny_config, tiny_model, tiny_tokenizer
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

import redraft
from redraft.config import DecodeSettings, QuantSpec
from redraft.decode.entropy_bound import ENTROPY_BOUND
from redraft.engine.engine import Engine, open_desk
from redraft.engine.events import Committed, Draft
from redraft.engine.loop import Request
from redraft.engine.tickets import Desk
from redraft.hf import network, tiers
from redraft.hf.experts import twin
from redraft.hf.generate import _CACHE, draw_seeds
from redraft.hf.tiers import install
from redraft.kernels.experts_layout import repack
from redraft.kernels.launch import INTERPRET
from redraft.kernels.sampling import counter_statistics
from redraft.network.fused import FusedModel, stacked
from redraft.network.model import Model
from redraft.quant.load import load_checkpoint
from redraft.store.names import PACKED_NAMES

SPEC = QuantSpec(16, 8)
BATCH = torch.tensor([[0, 0, 2, 30, 41, 17], [2, 8, 9, 10, 11, 12], [0, 2, 50, 51, 52, 53]])
PROMPTS = [row[row != 0].tolist() for row in BATCH]
MASK = {"attention_mask": BATCH != 0}
SETTINGS = {**MASK, "pad_token_id": 0, "eos_token_id": [1, 5], "max_new_tokens": 20, "max_denoising_steps": 5}
SOON = {"stability_threshold": 0, "confidence_threshold": 4.4}  # canvases of the tiny model end after 1 to 5 passes
ONE = {**SETTINGS, "attention_mask": torch.ones(1, 6)}


@pytest.fixture(scope="module")
def plain(packed_dir):
    """A packed model in tier `bitexact`."""
    model = from_pretrained(packed_dir)
    install(model, "bitexact")
    return model


@pytest.fixture
def turbo(plain):
    model = copy.deepcopy(plain)
    install(model, "turbo")
    return model


@pytest.fixture(autouse=True)
def _no_fallback_unseen() -> Iterator[None]:
    """A call that leaves the loop fails a test that does not expect it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "generate runs as transformers does")
        yield


@pytest.fixture(scope="module")
def engine(packed_dir) -> Engine:
    return redraft.load(packed_dir, device="cpu")


def generate(model: Any, seed: int, ids: torch.Tensor = BATCH, **settings: Any) -> Run:
    return same_bits.generate(model, ids, seed, **{**SETTINGS, **settings})


def from_desk(desk: Desk, seed: int, prompts: list[list[int]], settings: DecodeSettings, length: int) -> Run:
    """What `generate` must return and show for these prompts, of requests that know nothing of transformers."""
    torch.manual_seed(seed)
    seeds = draw_seeds(len(prompts), torch.default_generator)
    requests = [Request(prompt, ENTROPY_BOUND, settings, s) for prompt, s in zip(prompts, seeds, strict=True)]
    canvases: list[list[tuple[list[list[int]], list[int]]]] = []  # by row: the drafts of each, and its tokens
    for ticket in desk.submit(requests):
        canvases.append([([], [])])
        for event in ticket:
            drafts, tokens = canvases[-1][-1]
            if isinstance(event, Draft):
                drafts.append(event.tokens)
            elif isinstance(event, Committed):
                tokens += event.tokens + [0] * (length - len(event.tokens))
                canvases[-1].append(([], []))
        canvases[-1].pop()
    over = ([[0] * length], [0] * length)  # shown as padding
    sequences, drafts = [], []
    for index in range(max(map(len, canvases))):
        row = [own[index] if index < len(own) else over for own in canvases]
        sequences.append(torch.tensor([tokens for _, tokens in row]))
        for step in range(max(len(shown) for shown, _ in row)):
            drafts.append(torch.tensor([shown[min(step, len(shown) - 1)] for shown, _ in row]))
    return torch.cat(sequences, dim=1), drafts


def expected(engine: Engine, seed: int, prompts: list[list[int]] | None = None, **settings: Any) -> Run:
    chosen = DecodeSettings(**{"max_new_tokens": 24, "max_denoising_steps": 5, "eos_token_ids": (1, 5), **settings})
    return from_desk(engine._desk, seed, prompts or PROMPTS, chosen, 8)


def new(run: Run) -> Run:
    """Without the prompts."""
    return run[0][:, BATCH.shape[1] :], run[1]


# The engine's answers


def test_tokens_and_drafts_are_those_of_the_engine(turbo, engine):
    """Prompts padded on the left, several canvases, rows that end apart; later calls by their own settings."""
    bound = generation.EntropyBoundSamplerConfig(entropy_bound=2.0)
    calls = [
        ({}, {}),
        (SOON, SOON),
        (SOON | {"cache_implementation": "static"}, SOON),
        ({"sampler_config": bound, "t_max": 0.9}, {"entropy_bound": 2.0, "t_max": 0.9}),
        ({"t_min": None, "eos_token_id": None}, {"t_min": 1.0, "t_max": 1.0, "eos_token_ids": ()}),
        (SOON | {"stability_threshold": None, "eos_token_id": 7}, {"stability_threshold": 5, "eos_token_ids": (7,)}),
        ({"max_new_tokens": 256, "max_length": 14}, {"max_new_tokens": 8}),
    ]
    steps = set()
    for seed, (settings, own) in enumerate(calls):
        run = generate(turbo, seed, **settings)
        assert same(new(run), expected(engine, seed, **own)), settings
        assert torch.equal(run[0][:, :6], BATCH)
        steps.add(len(run[1]))
    assert len(steps) > 3


def test_rates_kinds_of_results_and_of_prompts(turbo, engine):
    torch.manual_seed(1)
    with torch.inference_mode():  # what a call leaves there serves the others
        out = turbo.generate(BATCH, **SETTINGS, **SOON)
    torch.manual_seed(1)
    seeds = draw_seeds(3, torch.default_generator)
    chosen = {**SOON, "max_new_tokens": 24, "max_denoising_steps": 5, "eos_token_ids": (1, 5)}
    rates = [r.tokens_per_forward for r in engine.generate_batch(PROMPTS, seed=seeds, **chosen)]
    assert out.tokens_per_forward.tolist() == pytest.approx(rates)
    assert torch.equal(generate(turbo, 1, **SOON, mm_token_type_ids=torch.zeros_like(BATCH))[0], out.sequences)
    torch.manual_seed(1)
    plain_tensor = turbo.generate(input_ids=BATCH, **SETTINGS, **SOON, return_dict_in_generate=False)
    assert torch.equal(plain_tensor, out.sequences)
    assert not torch.equal(turbo.generate(BATCH, **SETTINGS, **SOON).sequences, out.sequences)


def test_without_padding_a_canvas_is_whole(turbo, engine):
    """As in stock transformers, which pads behind the end token only where there is a pad_token_id."""
    one = {**ONE, "pad_token_id": None, "eos_token_id": list(range(2, 96, 2))}
    sequences, drafts = generate(turbo, 1, BATCH[1:2], **one)
    assert torch.equal(sequences[:, 6:14], drafts[4]) and sequences.shape[1] == 6 + len(drafts) // 5 * 8
    assert set(range(2, 96, 2)) & set(sequences[0, -8:-1].tolist())


def test_streamers_are_fed_as_by_transformers(plain, turbo):
    class Everything(_Drafts):
        def put(self, value: torch.Tensor) -> None:
            self.drafts.append(value)

        def end(self) -> None:
            self.drafts.append(torch.empty(0))

    class Canvases(Everything):
        put_draft = property()

    for kind in (Everything, Canvases):
        seen = []
        for model in (plain, turbo):
            seen.append(kind())
            out = model.generate(BATCH, streamer=seen[-1], **{**SETTINGS, "eos_token_id": None}).sequences
            confirmed = [v for v in seen[-1].drafts if v.ndim == 2][:: 6 if kind is Everything else 1]
            assert torch.equal(torch.cat(confirmed, dim=1), out)
        assert [v.shape for v in seen[0].drafts] == [v.shape for v in seen[1].drafts]
    assert len(seen[1].drafts) == 1 + 3 + 1


def test_a_merged_adapter(tiny_dir, tmp_path):
    model = peft_model(tiny_dir)
    redraft.accelerate(model, "turbo", SPEC)
    model.get_base_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert same(new(generate(model, 4, **SOON)), expected(redraft.load(tmp_path, device="cpu"), 4, **SOON))


def test_seeds_give_rightly_distributed_draws():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.manual_seed(0)
    seeds = torch.tensor(draw_seeds(2000, torch.default_generator))
    counts = counter_statistics(p.log().expand(2000, 2, 4), seeds, 0, 1).draw.flatten().bincount(minlength=4)
    chi = float(((counts - 4000 * p) ** 2 / (4000 * p)).sum())
    assert chi < 16.3, counts  # 0.999 of chi-square with 3 degrees of freedom


# Caches


def test_a_conversation_goes_on_from_the_returned_cache(turbo, engine):
    """Twice, in one object that grows; the last canvas is not in it, as in stock transformers."""
    more = torch.tensor([[30, 31, 32]] * 3)
    torch.manual_seed(1)
    first = turbo.generate(BATCH, **SETTINGS)
    cache, mask, prompts = (
        copy.deepcopy(first[_CACHE]),
        MASK["attention_mask"],
        [row[row != 0].tolist() for row in BATCH],
    )
    run, given = first.sequences, BATCH
    for seed in (2, 3):
        prompts = [p + row for p, row in zip(prompts, run[:, given.shape[1] : -8].tolist(), strict=True)]
        prompts = [p + row for p, row in zip(prompts, more.tolist(), strict=True)]
        mask = torch.nn.functional.pad(mask, (0, run.shape[1] - given.shape[1] - 8 + 3), value=True)
        assert cache.get_seq_length() + 3 == mask.shape[1]
        run, drafts = generate(turbo, seed, more, **{_CACHE: cache}, attention_mask=mask)
        given = more
        assert same((run[:, 3:], drafts), expected(engine, seed, prompts))


def test_a_returned_cache_has_keys_and_values_for_who_asks(plain, turbo):
    settings = {**SETTINGS, "eos_token_id": None}
    ours = turbo.generate(BATCH, **settings)
    state = torch.get_rng_state()
    cache = ours[_CACHE]
    assert "(3, 22)" in repr(cache) and len(cache.layers) == 3
    assert torch.equal(torch.get_rng_state(), state)
    stock = DynamicCache(config=plain.config.get_text_config(decoder=True))
    tokens, mask = ours.sequences[:, :-8], torch.nn.functional.pad(BATCH != 0, (0, 16), value=True)
    plain.generate(tokens, **{_CACHE: stock}, **{**settings, "attention_mask": mask, "max_new_tokens": 8})
    for layer, other in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    more, mask = BATCH[:, -1:], torch.nn.functional.pad(mask, (0, 1), value=True)
    runs = []
    for model, one in ((turbo, cache), (plain, stock)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs.append(generate(model, 5, more, **{_CACHE: one}, attention_mask=mask))
    assert same(*runs)


# What the loop does not know


class Only7(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: torch.Tensor, cur_step: Any = None) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill(-1, torch.tensor([7]), 0.0)


class Stop(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(3, dtype=torch.bool)


class Logits(_Drafts):
    _takes_logits = True

    def put_draft(self, logits: torch.Tensor) -> None:
        self.drafts.append(logits)


class Config(generation.EntropyBoundSamplerConfig): ...


def holes() -> torch.Tensor:
    mask = BATCH != 0
    mask[1, 3] = False
    return mask


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (lambda: {"logits_processor": LogitsProcessorList([Only7()])}, "logits_processor given"),
        (lambda: {"stopping_criteria": StoppingCriteriaList([Stop()])}, "stopping_criteria given"),
        (lambda: {"decoder_input_ids": torch.full((3, 8), 4)}, "decoder_input_ids given"),
        (lambda: {"attention_mask": holes()}, "an attention_mask of more than padding on the left"),
        (lambda: {"attention_mask": (BATCH != 0).flip(1)}, "an attention_mask of more than padding on the left"),
        (lambda: {"mm_token_type_ids": (BATCH == 30).long()}, "mm_token_type_ids name images"),
        (lambda: {_CACHE: DynamicCache(config=tiny_config())}, "a cache that this model's generate did not return"),
        (lambda: {"sampler_config": Config(entropy_bound=0.1)}, "the sampler is a Config"),
        (lambda: {"t_min": 0.0}, "t_min is 0.0, expected a number above 0"),
        (lambda: {"pad_token_id": None}, "a batch without pad_token_id"),
        (lambda: {"max_new_tokens": 272}, "need 268 positions, a slot has 256"),
    ],
)
def test_it_runs_as_in_transformers_and_says_why_once(plain, turbo, settings, reason):
    one = {"max_denoising_steps": 1}
    with pytest.warns(UserWarning, match=reason):
        run = generate(turbo, 1, **one | settings())
    assert same(run, generate(plain, 1, **one | settings()))  # the second time without a warning
    assert same(generate(turbo, 1, **one | settings()), run)
    if "logits_processor" in reason:
        assert (run[0][:, 6:] == 7).all()


def test_streamers_that_take_logits_get_them(plain, turbo):
    streamers = Logits(), _Drafts()
    for model, streamer in zip((turbo, plain), streamers, strict=True):
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.generate(BATCH, streamer=streamer, **SETTINGS)
        assert ["the streamer takes logits" in str(w.message) for w in said] == [True] * (model is turbo)
    assert len(streamers[0].drafts) == 15
    assert all(torch.equal(a.argmax(-1), b) for a, b in zip(*(s.drafts for s in streamers), strict=True))


class Adapted(torch.nn.Module):
    """As PEFT wraps a layer: the layer's own weight, and an update beside it."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.weight = base, base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * x.mean(-1, keepdim=True)


def adapt(model: Any) -> None:
    for layer in model.model.decoder.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)


def add_bias(model: Any) -> None:
    linear = model.model.decoder.layers[1].mlp.up_proj
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))


def untie(model: Any) -> None:
    norm = model.model.encoder.language_model.layers[1].self_attn.q_norm
    norm.weight = torch.nn.Parameter(2 * norm.weight)


def hook(model: Any) -> None:
    model.model.decoder.norm.register_forward_hook(lambda module, given, out: 0.1 * out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapt, "model.decoder.layers.0.self_attn.q_proj is a Adapted; adapters must be merged first"),
        (add_bias, "model.decoder.layers.1.mlp.up_proj has a bias"),
        (untie, "layers.1.self_attn.q_norm.weight differs between encoder and decoder"),
        (hook, "model.decoder.norm has hooks or a forward of its own"),
        (lambda model: setattr(model.lm_head, "_hf_hook", None), "hooks of the accelerate library"),
        (lambda model: model.model.decoder.norm.to(torch.float64), "weights are in torch.float32 and torch.float64"),
    ],
)
def test_what_a_model_became_is_obeyed(plain, turbo, change, reason):
    """After its first call; and what accelerate says of such a model."""
    generate(turbo, 1)
    plain = copy.deepcopy(plain)
    change(plain)
    change(turbo)
    with pytest.warns(UserWarning, match=reason):
        run = generate(turbo, 1, max_denoising_steps=2)
    assert same(run, generate(plain, 1, max_denoising_steps=2))
    assert reason in install(turbo, "turbo")[1]["generate"]


def test_other_parameters_are_noticed(plain, turbo):
    """Replaced, changed in place, of another dtype: as in a model that was so from the start."""

    def replace(model: Any) -> None:
        for layers in (model.model.decoder.layers, model.model.encoder.language_model.layers):
            layers[0].mlp.up_proj.weight = weight

    def change(model: Any) -> None:
        model.model.decoder.norm.weight.data *= torch.linspace(0.2, 3, 32)

    weight = torch.nn.Parameter(torch.randn(48, 32))
    before, other = generate(turbo, 1), copy.deepcopy(plain)
    for step in (replace, change, lambda model: model.to(torch.float64)):
        for model in (turbo, other):
            step(model)
        fresh = copy.deepcopy(other)
        install(fresh, "turbo")
        after = generate(turbo, 1)
        assert same(after, generate(fresh, 1)) and not same(after, before)
        before = after if step is not change else (before[0], [])
    install(turbo, "bitexact")
    assert same(generate(turbo, 1), generate(other, 1))


def test_the_report_says_what_does_not_run(turbo, monkeypatch):
    replaced, kept = install(turbo, "turbo")
    assert set(replaced) == {"entropy", "generate"}
    assert kept["norms, QKV and sampling"] == "torch's operations, because the model is on cpu, the kernels need a GPU"
    monkeypatch.setattr("redraft.engine.engine.HAS_TRITON", False)
    covered = tiny_model(hidden_size=128, moe_intermediate_size=64)
    redraft.accelerate(covered, "off", QuantSpec(64, 32))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert network.no_kernels(turbo) == "the model is in torch.float32, the kernels compute in BF16"
    assert network.no_kernels(turbo.bfloat16()) == "the GPU kernels do not cover these shapes"
    assert network.no_kernels(covered.bfloat16()) == "Triton is not installed"


# Fused passes


@pytest.fixture
def fused(tmp_path, monkeypatch) -> Any:
    """A BF16 model whose shapes the kernels cover, and its directory; on a CPU they run in Triton's interpreter."""
    if not INTERPRET.value:
        pytest.skip("runs in Triton's interpreter")
    shapes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 2}
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 16, "num_experts": 4, "intermediate_size": 64}
    model = tiny_model(**shapes, **sizes).to(torch.bfloat16)
    redraft.accelerate(model, "bitexact", QuantSpec(64, 32))
    model.save_pretrained(tmp_path)
    for layer in model.model.decoder.layers:  # as on a GPU
        layer.experts.repacked = repack(layer.experts.packed(), layer.experts.config, layer.experts.spec)
        for name in PACKED_NAMES:
            delattr(layer.experts, name)
    for module in (network, tiers):
        monkeypatch.setattr(module, "no_kernels", lambda model: None)
    return model, tmp_path


def held(model: Any) -> int:
    storages = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_fused_passes_on_joined_weights(fused):
    """The engine's tokens; parameters are views of what is multiplied at once, also in a twin; saving loses nothing."""
    model, path = fused
    before, bytes_before = {k: v.clone() for k, v in model.state_dict().items()}, held(model)
    other = twin(model)
    report = redraft.accelerate(model)
    assert {"entropy", "norms", "QKV", "sampling", "generate"} < set(report.replaced)
    install(other, "turbo")
    checkpoint = load_checkpoint(path)
    kernels = FusedModel(checkpoint.config, checkpoint.weights, checkpoint.spec)
    desk = open_desk(Model(checkpoint.config, checkpoint.weights), kernels, None)
    settings, runners = {"max_new_tokens": 8, "max_denoising_steps": 2}, []
    _, (first, second) = run = from_desk(desk, 1, [BATCH[1].tolist()], DecodeSettings(**settings), 8)
    assert not torch.equal(first, second)
    for each, passes in ((model, 2), (other, 1), (model, 1)):
        own = generate(each, 1, BATCH[1:2], **{**ONE, **settings, "max_denoising_steps": passes})
        assert same(new(own), run if passes == 2 else (first, [first]))
        runners.append(each._redraft_loop._desk._loop.runner)
    assert runners[0] is runners[2] is not runners[1]  # what was captured serves later calls
    experts = [layer.experts.repacked for layer in model.model.decoder.layers]
    for runner in runners:
        assert all(own.experts is other for own, other in zip(runner.model.layers, experts, strict=True))
    assert held(model) == bytes_before
    for decoder, encoder in zip(model.model.decoder.layers, model.model.encoder.language_model.layers, strict=True):
        attention, mlp = decoder.self_attn, decoder.mlp
        for linears in ([attention.q_proj, attention.k_proj], [mlp.gate_proj, mlp.up_proj]):
            assert stacked([linear.weight for linear in linears]) is not None
        assert encoder.self_attn.k_proj.weight is attention.k_proj.weight
        assert other.model.decoder.layers[0].mlp.up_proj.weight is model.model.decoder.layers[0].mlp.up_proj.weight
    assert_same_bits(model.state_dict(), before)
    model.save_pretrained(path / "again")
    assert_same_bits(load(path / "again").state_dict(), load(path).state_dict())


@pytest.fixture
def on_gpu(tmp_path) -> Any:
    """The bundled model in BF16 on a GPU in tier `off`, and its packed directory."""
    redraft.quantize("demo", tmp_path / "w4")
    model = from_pretrained(tmp_path / "w4", dtype=torch.bfloat16, device_map="cuda").eval()
    redraft.accelerate(model, "off")
    return model, tmp_path / "w4"


def ask(model: Any, seed: int) -> list[list[int]]:
    ids = torch.tensor([[0, 0, 2, 50, 60], [2, 50, 60, 70, 80]], device="cuda")
    torch.manual_seed(seed)
    return model.generate(ids, attention_mask=ids != 0, max_new_tokens=128, pad_token_id=0).sequences[:, 5:].tolist()


@pytest.mark.gpu
def test_on_a_gpu_it_answers_as_the_engine(on_gpu):
    model, path = on_gpu
    assert {"norms", "QKV", "sampling", "generate"} < set(redraft.accelerate(model).replaced)
    engine, runners = redraft.load(path), []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        seeds = draw_seeds(2, torch.cuda.default_generators[0])
        results = engine.generate_batch([[2, 50, 60], [2, 50, 60, 70, 80]], seed=seeds, max_new_tokens=128)
        rows = ask(model, seed)
        assert rows == [r.token_ids + [0] * (len(rows[0]) - len(r.token_ids)) for r in results]
        runners.append(model._redraft_loop._desk._loop.runner)
    assert runners[0] is runners[1] is runners[2]


def allocated() -> int:
    """Bytes of tensors on the GPU, workspaces of the matrix library left out."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_held_twice(on_gpu):
    """Beside the runner's own buffers a call leaves nothing, and all of those go with the tier."""
    model, _ = on_gpu
    before = allocated()
    redraft.accelerate(model)
    for end in (lambda: model._redraft_loop._desk.close(), lambda: redraft.accelerate(model, "off")):
        ask(model, 1)
        assert allocated() - before > 2**20
        end()
        # The engine's own are rope's frequencies; joined weights would be 3.5 MiB.
        assert allocated() - before < 2**20


@pytest.mark.gpu
def test_on_a_gpu_tiers_run_side_by_side(on_gpu):
    model, _ = on_gpu
    stock, before, other = ask(model, 1), allocated(), twin(model)
    redraft.accelerate(other)
    first = ask(other, 1)
    assert ask(model, 1) == stock
    assert ask(other, 1) == first
    other._redraft_loop.close()
    assert allocated() - before < 2**20
