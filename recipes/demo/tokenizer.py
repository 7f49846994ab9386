"""The demo model's tokenizer: byte-level BPE trained on text from `tasks`, single digits, Gemma's turn tokens."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.demo.tasks import TASKS

VOCAB_SIZE = 1280
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>")  # ids 0 to 4
TURN_END = "<turn|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ message['content'] | trim + '<turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def corpus(items_per_task: int, seed: int = 0) -> list[str]:
    """Training text for the BPE: prompts and answers of every task, from training parameters only."""
    rng = random.Random(seed)
    texts = ["user\n", "model\n", "system\n"] * items_per_task
    for task in TASKS.values():
        for _ in range(items_per_task):
            item = task.train_item(rng)
            texts += [item.prompt, item.answer]
    return texts


def build(items_per_task: int = 4000) -> PreTrainedTokenizerFast:
    """Train the tokenizer. Digits are always single tokens, so numbers have one spelling."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(items_per_task), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<|turn>", TURN_END],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def save(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer so that every transformers version since 5.12 finds its class."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key in ("is_local", "local_files_only"):  # of the machine it was saved on
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Ids of one user turn with the generation prompt."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
