"""Write the held-out items that ship with the demo model: `python -m recipes.demo.heldout`."""

import json
from collections.abc import Iterator

from recipes.demo.tasks import TASKS, Item
from redraft.evaluate.demo import FILE
from redraft.files import write_text

COUNT = dict.fromkeys(TASKS, 1000) | {"facts": 832}  # of the facts there are no more


def lines() -> Iterator[str]:
    """One JSON object per item, task after task, in the order of the generators."""
    for name, task in TASKS.items():
        for item in task.heldout_items(COUNT[name]):
            yield json.dumps(_row(name, item), ensure_ascii=False, separators=(",", ":")) + "\n"


def _row(name: str, item: Item) -> dict[str, object]:
    row: dict[str, object] = {"task": name, "prompt": item.prompt, "answer": item.answer}
    return row | {"words": item.params} if name == "stories" else row


if __name__ == "__main__":
    write_text(FILE, "".join(lines()))
