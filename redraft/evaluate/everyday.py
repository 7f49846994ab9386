"""Everyday: short ordinary questions of our own. The figure that matters is the time to a finished answer."""

from __future__ import annotations

from redraft.evaluate.base import Benchmark, Item

QUESTIONS = (
    "How do I boil an egg so that the yolk stays soft?",
    "Write a two-sentence thank-you note to a neighbour who watered my plants.",
    "What is the difference between weather and climate?",
    "Give me three ideas for a quick vegetarian dinner.",
    "Explain in one paragraph why the sky is blue.",
    "How many cups of rice do I need for four people?",
    "Turn this into a polite e-mail: I cannot come to the meeting on Friday.",
    "What should I pack for a weekend in the mountains in autumn?",
    "Translate into French: Where is the nearest train station?",
    "Summarise in one sentence: The shop opens at nine, but on Mondays it stays closed because of stocktaking.",
    "How can I remove a red wine stain from a cotton shirt?",
    "Suggest a name for a small café that also sells books, with one reason.",
    "What does the word 'ubiquitous' mean? Give one example sentence.",
    "I have 45 minutes. Suggest a simple workout without equipment.",
    "Why do cats purr?",
    "Write a haiku about the first snow.",
    "How do I split a bill of 84 euros among three friends with a tip of 10 percent?",
    "List the steps to change a flat bicycle tyre.",
    "What are two pros and two cons of working from home?",
    "Correct the grammar: Me and him goes to the market yesterday.",
    "How long can cooked pasta stay in the fridge?",
    "Write a short birthday message for a colleague I do not know well.",
    "Which day comes three days after Saturday, and why is that easy to get wrong?",
    "Explain to a child of six what a bank does.",
    "Write a Python one-liner that counts the words in a string.",
    "Recommend a bedtime routine that helps to fall asleep.",
)


class Everyday(Benchmark):
    """Right when the model ended its answer itself and wrote something; what it says is for a reader to judge."""

    name = "everyday"
    description = f"{len(QUESTIONS)} short ordinary questions; the time to answer counts"

    def items(self, limit: int) -> list[Item]:
        return [Item(f"{self.name}/{i}", question, "") for i, question in enumerate(QUESTIONS[:limit])]

    def grade(self, item: Item, answer: str, ended: bool = True) -> bool:
        return ended and bool(answer.strip())
