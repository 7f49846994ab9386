"""The engine's promises: cut at EOS and length, events, seeds, batches, and what it refuses."""

import weakref

import pytest
import torch
from tiny import CANVAS, VOCAB

import redraft
from redraft.engine.eager import Rows
from redraft.engine.events import Committed, Draft, Result
from redraft.errors import UsageError

PROMPT = [5, 9, 40, 41, 42]
FAST = {"max_denoising_steps": 4, "max_new_tokens": 2 * CANVAS}


@pytest.fixture(scope="module")
def engine(tiny_dir):
    return redraft.load(tiny_dir, weights="bf16", device="cpu")


@pytest.fixture
def scripted(engine, monkeypatch):
    """Make canvas after canvas come out as given, in two passes each, whatever the network says."""

    def script(*canvases: list[list[int]]) -> None:
        def take(rows: Rows, logits: torch.Tensor) -> None:
            first, canvas = int(rows.stream._seeds[0]), int(rows.state.canvas_index[0])
            wanted = torch.tensor(canvases[canvas][first : first + len(logits)])
            original(rows, torch.nn.functional.one_hot(wanted, VOCAB).float() * 60)

        original = Rows.take
        monkeypatch.setattr(Rows, "take", take)

    return script


def _canvas(*tokens: int) -> list[int]:
    return [*tokens, *[50] * (CANVAS - len(tokens))]


def test_text_ends_at_the_first_end_token(engine, scripted):
    scripted([_canvas()], [_canvas(60, 61, 1, 62, 4)])
    result = engine.generate(PROMPT, eos_token_ids=(1, 4), max_new_tokens=4 * CANVAS)
    assert result.token_ids == [50] * CANVAS + [60, 61, 1]
    assert (result.finish_reason, result.canvases, result.steps_per_canvas) == ("stop", 2, [2, 2])
    assert result.forwards == 4
    assert result.tokens_per_forward == (CANVAS + 3) / 4
    assert result.prompt_tokens == len(PROMPT)
    assert result.text == engine.decode([50] * CANVAS + [60, 61])
    assert "<eos>" not in result.text


def test_length_is_kept_to_the_token(engine, scripted):
    scripted([_canvas()], [_canvas(60, 61, 62, 1)])
    result = engine.generate(PROMPT, eos_token_ids=(1,), max_new_tokens=CANVAS + 2)
    assert result.token_ids == [*[50] * CANVAS, 60, 61]
    assert result.finish_reason == "length", "the end token lies beyond the limit"
    exact = engine.generate(PROMPT, eos_token_ids=(1,), max_new_tokens=CANVAS)
    assert (len(exact.token_ids), exact.canvases, exact.finish_reason) == (CANVAS, 1, "length")


def test_padding_inside_a_canvas_is_not_counted(engine, scripted):
    scripted([_canvas(0, 0, 60, 1)])
    result = engine.generate(PROMPT, eos_token_ids=(1,), max_new_tokens=CANVAS)
    assert result.tokens_per_forward == 2 / 2 and result.tokens == 2 < len(result.token_ids)
    assert result.tokens_per_second == 2 / result.seconds


def test_batch_rows_finish_on_their_own(engine, scripted):
    scripted([_canvas(1), _canvas()], [_canvas(60), _canvas(61, 1)])
    first, second = engine.generate_batch([PROMPT, PROMPT[:2]], eos_token_ids=(1,), max_new_tokens=4 * CANVAS)
    assert (first.token_ids, first.steps_per_canvas) == ([1], [2])
    assert (second.token_ids, second.steps_per_canvas) == ([50] * CANVAS + [61, 1], [2, 2])
    assert (first.seed, second.seed) == (0, 1)


def test_stream_tells_the_same_story_as_generate(engine):
    events = list(engine.stream(PROMPT, seed=3, **FAST))
    result = events[-1]
    drafts, committed = [e for e in events if isinstance(e, Draft)], [e for e in events if isinstance(e, Committed)]
    assert isinstance(result, Result)
    assert [c.steps for c in committed] == result.steps_per_canvas == [4, 4]
    assert [(d.canvas, d.step) for d in drafts] == [(c, s) for c in (0, 1) for s in (1, 2, 3, 4)]
    assert [token for c in committed for token in c.tokens] == result.token_ids
    assert "".join(c.text for c in committed) == result.text
    assert drafts[3].tokens == committed[0].tokens
    assert all(any(d.accepted) and len(d.accepted) == CANVAS and d.mean_entropy > 0 for d in drafts)
    plain = engine.generate(PROMPT, seed=3, **FAST)
    assert (plain.token_ids, plain.text) == (result.token_ids, result.text)


@pytest.mark.parametrize("tier", ["off", "bitexact", "turbo"])
def test_the_seed_decides(engine, tier):
    runs = [engine.generate(PROMPT, seed=s, tier=tier, **FAST).token_ids for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    engine.generate(PROMPT, seed=1, tier=tier, **FAST)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator was used"


def test_turbo_text_does_not_depend_on_the_batch(engine):
    prompts = [PROMPT, PROMPT[:2], PROMPT * 4]
    together = engine.generate_batch(prompts, seed=[7, 8, 9], **FAST)
    for prompt, seed, result in zip(prompts, (7, 8, 9), together, strict=True):
        assert engine.generate(prompt, seed=seed, **FAST).token_ids == result.token_ids


def test_prompts_join_while_others_run(engine):
    """Submitted one by one, read in turn: each as it is alone; what a conversation repeats is not read again."""
    tickets = [engine.submit(PROMPT[: i + 1], seed=i, **FAST) for i in range(3)]
    streams, results = [iter(t) for t in tickets], []
    while len(results) < 3:
        results += [e for e in (next(s, None) for s in streams) if isinstance(e, Result)]
    for result in results:
        alone = engine.generate(PROMPT[: result.seed + 1], seed=result.seed, **FAST)
        assert alone.token_ids == result.token_ids
    turn = [*PROMPT[:3], *next(r for r in results if r.seed == 2).token_ids, 60, 61]
    assert engine.generate(turn, seed=9, **FAST).cached_tokens == 3 + CANVAS


def test_slots_and_context_are_planned_at_load(tiny_dir):
    small = redraft.load(tiny_dir, weights="bf16", device="cpu", slots=2, context=40)
    assert [r.canvases for r in small.generate_batch([PROMPT] * 5, **FAST)] == [2] * 5
    with pytest.raises(UsageError, match="need 58 positions, a slot has 40"):
        small.generate([5] * 50, **FAST)


def test_an_engine_is_freed_the_moment_nobody_holds_it(tiny_dir, no_collection):
    """With its runner, and the graphs that one holds on a GPU."""
    dropped = redraft.load(tiny_dir, weights="bf16", device="cpu")
    stream = dropped.stream(PROMPT, **FAST)
    next(stream)
    dead = [weakref.ref(dropped), weakref.ref(dropped._desk._loop.runner)]
    stream.close()
    del stream, dropped
    assert [ref() for ref in dead] == [None, None]


def test_text_and_messages_go_through_the_template(engine):
    ids = engine.encode_prompt("hi")
    assert engine.tokenizer.decode(ids) == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert engine.encode_prompt([{"role": "user", "content": "hi"}]) == ids
    assert engine.encode_prompt((2, 3)) == [2, 3]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        (" \n", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([{"role": "user", "content": ""}], {}, "the prompt is empty"),
        ([{"role": "user"}], {}, "content is NoneType"),
        ([5, VOCAB], {}, f"token id {VOCAB} at position 1"),
        ([-1], {}, "token id -1 at position 0"),
        ([2.5], {}, "token id 2.5"),
        ([5] * 250, {}, "exceeds the context of 256"),
        ([5], {"max_new_tokens": 4096}, "exceeds the context of 256"),
        ([5], {"temperature": 1.0}, "unknown setting 'temperature'"),
        ([5], {"entropy_bound": -1}, "entropy_bound is -1"),
        ([5], {"seed": -1}, "seed is -1"),
        ([5], {"tier": "warp"}, "tier is 'warp'"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, options, message):
    with pytest.raises(UsageError, match=message):
        engine.generate(prompt, **options)


def test_bad_batches_are_refused(engine):
    with pytest.raises(UsageError, match="no prompts"):
        engine.generate_batch([])
    with pytest.raises(UsageError, match="1 seeds were given for 2 prompts"):
        engine.generate_batch([PROMPT, PROMPT], seed=[1])
    with pytest.raises(UsageError, match="draws a whole batch from one seed"):
        engine.generate_batch([PROMPT, PROMPT], seed=[1, 2], tier="bitexact", **FAST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "weights is 'int3'"),
        ({"tier": "fast"}, "tier is 'fast'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:99"}, "device cuda:99 is not available"),
        ({"weights": "bf16", "device": "cpu", "slots": 0}, "slots is 0, expected a whole number of at least 1"),
    ],
)
def test_bad_load_options_are_refused(tiny_dir, options, message):
    with pytest.raises(UsageError, match=message):
        redraft.load(tiny_dir, **options)
