"""Everyday: short ordinary questions of our own. The figure that matters is the time to a finished answer."""

from pathlib import Path

from redraft.evaluate.base import Benchmark, Item


class Everyday(Benchmark):
    """Right when the model ended its answer itself and wrote something; what it says is for a reader to judge."""

    name = "everyday"
    description = "short ordinary questions; the time to answer counts"
    file, fields = "everyday.jsonl", ("question",)

    def __init__(self, data: Path | None = None) -> None:
        """data: where benchmarks have their files; this one's lies here."""
        super().__init__(Path(__file__).parent)

    def item(self, id: str, row: dict[str, str]) -> Item:
        return Item(id, row["question"], "")

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return ended and bool(answer.strip())
