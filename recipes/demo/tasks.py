"""The demo model's six tasks: items generated from seeds, and held-out parameters that training never sees.

An item is held out when a stable hash of its *parameters* (the numbers, words or choices that decide the answer, never
a decoration such as a person's name) falls into one bucket of `HELDOUT_BUCKETS`. Training draws again whenever it hits
that bucket, so the two sets are disjoint by construction, on every machine and Python version.
Graders are in `redraft.evaluate.demo`. All sentences, facts and problems here are our own wording.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

HELDOUT_BUCKETS = 8  # one parameter tuple in this many is kept for evaluation

Params = tuple[str | int, ...]


@dataclass(frozen=True)
class Item:
    """One prompt with its reference answer. `params` decides whether it is held out."""

    prompt: str
    answer: str
    params: Params


def is_heldout(task: str, params: Params) -> bool:
    """True when these parameters belong to the evaluation side; independent of the process and of PYTHONHASHSEED."""
    digest = hashlib.blake2b(repr((task, *params)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELDOUT_BUCKETS == 0


class Task:
    """A generator of items. Subclasses give `name` and `sample`."""

    name: ClassVar[str]

    def sample(self, rng: random.Random) -> Item:
        """Any item, training or held out."""
        raise NotImplementedError

    def train_item(self, rng: random.Random) -> Item:
        """An item whose parameters are not held out."""
        while True:
            item = self.sample(rng)
            if not is_heldout(self.name, item.params):
                return item

    def heldout_items(self, count: int, seed: int = 0) -> list[Item]:
        """`count` held-out items with different prompts, the same for the same seed."""
        rng = random.Random(f"{self.name}:heldout:{seed}")
        items: dict[str, Item] = {}
        misses = 0
        while len(items) < count:
            item = self.sample(rng)
            if is_heldout(self.name, item.params) and item.prompt not in items:
                items[item.prompt] = item
                misses = 0
            elif (misses := misses + 1) > 200_000:
                raise ValueError(f"task {self.name} has only {len(items)} held-out prompts, {count} asked for")
        return list(items.values())


# --------------------------------------------------------------------------------------------------------- word pools
HER = ("Mia", "Ana", "Lily", "Eva", "Nora", "Ruth", "Ida", "Zoe", "Emma", "Clara", "Rosa", "Vera")
HIM = ("Tom", "Ben", "Sam", "Max", "Leo", "Otto", "Paul", "Hugo", "Finn", "Jack", "Alex", "Noah")
NAMES = HER + HIM
THINGS = ("apples", "books", "coins", "cards", "eggs", "shells", "pens", "cups", "stones", "stamps", "nuts", "beads")
BOXES = ("bags", "boxes", "baskets", "packs")


def _two_names(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(NAMES, 2)
    return first, second


def _pronoun(name: str) -> str:
    return "She" if name in HER else "He"


# --------------------------------------------------------------------------------------------------------- arithmetic
@dataclass(frozen=True)
class Problem:
    """A word problem: its text, and its solution as (left, operator, right) steps, each with two whole numbers."""

    text: str
    steps: tuple[tuple[int, str, int], ...]
    numbers: tuple[int, ...]


def _calculate(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]


def _bags(r: random.Random) -> Problem:
    who, what, box = r.choice(NAMES), r.choice(THINGS), r.choice(BOXES)
    a, b, c = r.randint(2, 60), r.randint(2, 9), r.randint(2, 12)
    start = f"{who} has {a} {what}. {_pronoun(who)} buys {b} {box} with {c} {what} each."
    text = f"{start} How many {what} does {who} have now?"
    return Problem(text, ((b, "*", c), (a, "+", b * c)), (a, b, c))


def _give(r: random.Random) -> Problem:
    (who, friend), what = _two_names(r), r.choice(THINGS)
    b, c = r.randint(2, 40), r.randint(2, 40)
    a = b + c + r.randint(0, 40)
    text = f"{who} has {a} {what}, gives {b} to {friend} and loses {c}. How many {what} are left?"
    return Problem(text, ((a, "-", b), (a - b, "-", c)), (a, b, c))


def _find_and_give(r: random.Random) -> Problem:
    who, what = r.choice(NAMES), r.choice(THINGS)
    a, b = r.randint(5, 80), r.randint(5, 80)
    c = r.randint(2, a + b)
    text = f"{who} has {a} {what} and finds {b} more. Then {who} sells {c} of them. How many {what} remain?"
    return Problem(text, ((a, "+", b), (a + b, "-", c)), (a, b, c))


def _shop(r: random.Random) -> Problem:
    who, (x, y) = r.choice(NAMES), r.sample(("pen", "cup", "cake", "toy", "hat", "map"), 2)
    a, b, c = r.randint(2, 15), r.randint(2, 60), r.randint(2, 9)
    text = f"A {x} costs {a} coins and a {y} costs {b} coins. {who} buys {c} {x}s and one {y}. What is the total price?"
    return Problem(text, ((c, "*", a), (c * a, "+", b)), (a, b, c))


def _share(r: random.Random) -> Problem:
    who, what = r.choice(NAMES), r.choice(THINGS)
    b, q = r.randint(2, 9), r.randint(3, 15)
    c = r.randint(1, q)
    start = f"{who} shares {b * q} {what} equally among {b} friends."
    text = f"{start} Each friend gives back {c}. How many does each one keep?"
    return Problem(text, ((b * q, "/", b), (q, "-", c)), (b * q, b, c))


def _more(r: random.Random) -> Problem:
    (who, friend), what = _two_names(r), r.choice(THINGS)
    a, b = r.randint(3, 60), r.randint(2, 40)
    text = f"{who} has {a} {what}. {friend} has {b} more than {who}. How many {what} do they have together?"
    return Problem(text, ((a, "+", b), (a, "+", a + b)), (a, b))


def _times(r: random.Random) -> Problem:
    (who, friend), what = _two_names(r), r.choice(THINGS)
    a, b = r.randint(2, 25), r.randint(2, 9)
    text = f"{who} has {a} {what}. {friend} has {b} times as many. How many {what} do they have together?"
    return Problem(text, ((b, "*", a), (a, "+", b * a)), (a, b))


def _walk(r: random.Random) -> Problem:
    who, verb = r.choice(NAMES), r.choice(("walks", "runs", "rides", "swims"))
    a, b, c = r.randint(2, 15), r.randint(2, 9), r.randint(2, 50)
    text = f"{who} {verb} {a} miles a day for {b} days and then {c} miles more. How many miles is that in all?"
    return Problem(text, ((a, "*", b), (a * b, "+", c)), (a, b, c))


def _change(r: random.Random) -> Problem:
    who, what = r.choice(NAMES), r.choice(THINGS)
    b, c = r.randint(2, 9), r.randint(2, 9)
    a = b * c + r.randint(1, 30)
    text = f"{who} buys {b} {what} for {c} dollars each and pays with {a} dollars. How much change does {who} get?"
    return Problem(text, ((b, "*", c), (a, "-", b * c)), (a, b, c))


def _bags_minus(r: random.Random) -> Problem:
    (who, friend), what, box = _two_names(r), r.choice(THINGS), r.choice(BOXES)
    a, b, c = r.randint(2, 50), r.randint(2, 9), r.randint(2, 9)
    d = r.randint(2, a + b * c)
    text = f"{who} has {a} {what}, gets {b} {box} of {c} {what} and gives {d} {what} to {friend}. How many are left?"
    return Problem(text, ((b, "*", c), (a, "+", b * c), (a + b * c, "-", d)), (a, b, c, d))


def _rows(r: random.Random) -> Problem:
    place, thing = r.choice((("hall", "chairs"), ("garden", "trees"), ("shop", "jars"), ("field", "plants")))
    a, b = r.randint(2, 9), r.randint(3, 15)
    c = r.randint(2, a * b)
    text = f"A {place} has {a} rows of {b} {thing}. Then {c} {thing} are taken away. How many {thing} stay?"
    return Problem(text, ((a, "*", b), (a * b, "-", c)), (a, b, c))


def _two_products(r: random.Random) -> Problem:
    who, (x, y) = r.choice(NAMES), r.sample(("pens", "cups", "cakes", "toys", "hats", "maps"), 2)
    a, b, c, d = (r.randint(2, 9) for _ in range(4))
    text = f"{who} buys {a} {x} for {b} coins each and {c} {y} for {d} coins each. How many coins does {who} pay?"
    return Problem(text, ((a, "*", b), (c, "*", d), (a * b, "+", c * d)), (a, b, c, d))


PROBLEMS: dict[str, Callable[[random.Random], Problem]] = {
    "bags": _bags,
    "give": _give,
    "find": _find_and_give,
    "shop": _shop,
    "share": _share,
    "more": _more,
    "times": _times,
    "walk": _walk,
    "change": _change,
    "bags_minus": _bags_minus,
    "rows": _rows,
    "two_products": _two_products,
}


class Arithmetic(Task):
    """Word problems of two or three steps. Held out: the numbers of a problem kind."""

    name = "arithmetic"

    def sample(self, rng: random.Random) -> Item:
        kind = rng.choice(tuple(PROBLEMS))
        problem = PROBLEMS[kind](rng)
        lines = [f"{a} {op} {b} = {_calculate(a, op, b)}." for a, op, b in problem.steps]
        result = _calculate(*problem.steps[-1])
        answer = " ".join([*lines, f"The answer is {result}."])
        return Item(problem.text, answer, (kind, *problem.numbers))


# --------------------------------------------------------------------------------------------------------------- edit
ADJECTIVES = ("red", "old", "small", "happy", "dark", "green", "quiet", "tall", "young", "cold", "bright", "slow",
              "soft", "brave", "warm", "strange")  # fmt: skip
NOUNS = ("fox", "boy", "bird", "horse", "girl", "farmer", "cat", "teacher", "dog", "sailor", "king", "mouse", "baker",
         "bear", "painter", "goat")  # fmt: skip
VERBS = ("sleeps", "waits", "sings", "works", "plays", "hides", "stands", "walks", "jumps", "sits", "dances", "eats")
PREPOSITIONS = ("near", "behind", "under", "beside", "above", "inside")
PLACES = ("house", "river", "tree", "barn", "bridge", "market", "tower", "garden", "boat", "school", "wall", "hill")
ACTIONS = ("bought", "found", "lost", "painted", "sold", "counted", "saw", "carried", "hid", "made")


def _scene(r: random.Random) -> list[str]:
    """A sentence about a creature, as words; the full stop is part of the last one."""
    adjective, other = r.sample(ADJECTIVES, 2)
    return ["The", adjective, r.choice(NOUNS), r.choice(VERBS), r.choice(PREPOSITIONS), "the", other,
            r.choice(PLACES) + "."]  # fmt: skip


def _deed(r: random.Random, who: str) -> list[str]:
    """A sentence about a named person with a number in it."""
    return [who, r.choice(ACTIONS), str(r.randint(2, 99)), r.choice(THINGS), r.choice(PREPOSITIONS), "the",
            r.choice(PLACES) + "."]  # fmt: skip


class Edit(Task):
    """Carry out one instruction on a given text. Held out: instruction and text together."""

    name = "edit"

    def sample(self, rng: random.Random) -> Item:
        who, other = _two_names(rng)
        sentences = [_scene(rng), _deed(rng, who)]
        rng.shuffle(sentences)
        if rng.random() < 0.25:
            sentences = [_deed(rng, who)]
        words = [w for s in sentences for w in s]
        kinds = [self._replace, self._rename, self._number, self._delete, self._append, self._prepend]
        if len(sentences) > 1:  # a lone deed has nothing to swap
            kinds.append(self._swap)
        instruction, edited = rng.choice(kinds)(rng, words, who, other)
        text = " ".join(words)
        return Item(f"{instruction}: {text}", " ".join(edited), (instruction, text))

    @staticmethod
    def _replace(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        pools = (ADJECTIVES, NOUNS, VERBS, THINGS, ACTIONS)
        old = r.choice([w for w in words if any(w in p for p in pools)])
        pool = next(p for p in pools if old in p)
        new = r.choice([w for w in pool if w not in words])
        return f'Replace "{old}" with "{new}"', [new if w == old else w for w in words]

    @staticmethod
    def _rename(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        return f"Change the name to {other}", [other if w == who else w for w in words]

    @staticmethod
    def _number(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        number = str(r.randint(2, 99))
        return f"Change the number to {number}", [number if w.isdigit() else w for w in words]

    @staticmethod
    def _delete(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        old = r.choice([w for w in words if w in ADJECTIVES or w in THINGS])
        return f'Delete the word "{old}"', [w for w in words if w != old]

    @staticmethod
    def _append(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        extra = r.choice(("It is late.", "The end.", "It rains.", "All is well.", "Nobody knows why."))
        return f'Add "{extra}" at the end', [*words, extra]

    @staticmethod
    def _prepend(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        extra = r.choice(("Listen!", "Good news!", "Once more:", "As you know:", "Dear friends,"))
        return f'Add "{extra}" at the start', [extra, *words]

    @staticmethod
    def _swap(r: random.Random, words: list[str], who: str, other: str) -> tuple[str, list[str]]:
        a, b = r.sample([w for w in words if w in NOUNS or w in THINGS or w in ADJECTIVES], 2)
        return f'Swap "{a}" and "{b}"', [{a: b, b: a}.get(w, w) for w in words]


# -------------------------------------------------------------------------------------------------------------- lists
WORDS = ("apple", "bread", "cloud", "door", "engine", "fish", "glass", "hammer", "island", "jacket", "kite", "lemon",
         "moon", "needle", "orange", "pencil", "queen", "ring", "spoon", "table", "umbrella", "violin", "window",
         "yard", "zebra", "ant", "box", "candle", "drum", "egg", "flag", "gate")  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _words(r: random.Random, low: int = 3, high: int = 6) -> list[str]:
    return r.sample(WORDS, r.randint(low, high))


def _numbers(r: random.Random, low: int = 3, high: int = 6) -> list[int]:
    return r.sample(range(1, 100), r.randint(low, high))


def _comma(values: list[Any]) -> str:
    return ", ".join(str(v) for v in values)


def _list_sort(r: random.Random) -> tuple[str, str]:
    values = _numbers(r)
    if r.random() < 0.5:
        return f"Sort from small to large: {_comma(values)}", _comma(sorted(values))
    return f"Sort from large to small: {_comma(values)}", _comma(sorted(values, reverse=True))


def _list_alphabet(r: random.Random) -> tuple[str, str]:
    values = _words(r, 3, 5)
    return f"Sort by the alphabet: {_comma(values)}", _comma(sorted(values))


def _list_reverse(r: random.Random) -> tuple[str, str]:
    values: list[Any] = _words(r) if r.random() < 0.5 else _numbers(r)
    return f"Reverse the list: {_comma(values)}", _comma(values[::-1])


def _list_letters(r: random.Random) -> tuple[str, str]:
    values = r.sample(LETTERS, r.randint(3, 7))
    if r.random() < 0.5:
        return f"Reverse the letters: {' '.join(values)}", " ".join(values[::-1])
    return f"Write in capitals: {' '.join(values)}", " ".join(values).upper()


def _list_extreme(r: random.Random) -> tuple[str, str]:
    values = _numbers(r)
    if r.random() < 0.5:
        return f"What is the largest number in {_comma(values)}?", f"The largest number is {max(values)}."
    return f"What is the smallest number in {_comma(values)}?", f"The smallest number is {min(values)}."


def _list_count(r: random.Random) -> tuple[str, str]:
    values = _words(r, 2, 8)
    return f"How many words are in this list: {_comma(values)}?", f"The list has {len(values)} words."


def _list_pick(r: random.Random) -> tuple[str, str]:
    values, n = _words(r, 4, 6), r.randint(2, 3)
    if r.random() < 0.5:
        return f"Give the first {n} items of {_comma(values)}.", _comma(values[:n])
    return f"Give the last {n} items of {_comma(values)}.", _comma(values[-n:])


def _list_remove(r: random.Random) -> tuple[str, str]:
    values = _words(r, 4, 6)
    gone = r.choice(values)
    return f"Remove {gone} from the list: {_comma(values)}", _comma([v for v in values if v != gone])


def _list_insert(r: random.Random) -> tuple[str, str]:
    values = _words(r, 4, 6)
    new, anchor = values.pop(), r.choice(values)
    at = values.index(anchor) + 1
    return f"Insert {new} after {anchor}: {_comma(values)}", _comma([*values[:at], new, *values[at:]])


def _list_join(r: random.Random) -> tuple[str, str]:
    values, (word, mark) = _words(r), r.choice((("dashes", "-"), ("slashes", "/"), ("plus signs", "+"), ("dots", ".")))
    return f"Join with {word}: {_comma(values)}", mark.join(values)


def _list_unique(r: random.Random) -> tuple[str, str]:
    values = _words(r, 3, 4)
    doubled = [*values, *r.sample(values, r.randint(1, 2))]
    r.shuffle(doubled)
    return f"Remove the duplicates: {_comma(doubled)}", _comma(list(dict.fromkeys(doubled)))


LIST_OPERATIONS = (_list_sort, _list_alphabet, _list_reverse, _list_letters, _list_extreme, _list_count, _list_pick,
                   _list_remove, _list_insert, _list_join, _list_unique)  # fmt: skip


class Lists(Task):
    """Operations on lists and strings. Held out: operation and list together."""

    name = "lists"

    def sample(self, rng: random.Random) -> Item:
        prompt, answer = rng.choice(LIST_OPERATIONS)(rng)
        return Item(prompt, answer, (prompt,))


# -------------------------------------------------------------------------------------------------------------- facts
@dataclass(frozen=True)
class FactFamily:
    """Facts that share their wording: `{x}` in a question and `{y}` in the answer."""

    questions: tuple[str, ...]
    answer: str
    pairs: tuple[tuple[str, str], ...]


FACT_FAMILIES = (
    FactFamily(
        ("What is the capital of {x}?", "Which city is the capital of {x}?", "Name the capital of {x}.",
         "What do you call the capital city of {x}?"),
        "The capital of {x} is {y}.",
        (("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
         ("Greece", "Athens"), ("Austria", "Vienna"), ("Portugal", "Lisbon"), ("Norway", "Oslo"), ("Egypt", "Cairo"),
         ("Poland", "Warsaw"), ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Cuba", "Havana"), ("Canada", "Ottawa"),
         ("Ireland", "Dublin"), ("Finland", "Helsinki"), ("Chile", "Santiago"), ("Hungary", "Budapest"),
         ("Russia", "Moscow")),
    ),
    FactFamily(
        ("What color is {x}?", "Which color does {x} have?", "Tell me the color of {x}.",
         "If you look at {x}, which color do you see?"),
        "The color of {x} is {y}.",
        (("a ripe banana", "yellow"), ("fresh grass", "green"), ("clean snow", "white"), ("a clear sky", "blue"),
         ("coal", "black"), ("a ripe tomato", "red"), ("a carrot", "orange"), ("chocolate", "brown")),
    ),
    FactFamily(
        ("How many {x}?", "Count for me: how many {x}?", "Give the number: how many {x}?", "Tell me how many {x}."),
        "It is {y}.",
        (("legs does a spider have", "eight"), ("days are in a week", "seven"), ("months are in a year", "twelve"),
         ("minutes are in an hour", "sixty"), ("sides does a triangle have", "three"), ("legs does an ant have", "six"),
         ("wheels does a bicycle have", "two"), ("fingers are on one hand", "five"),
         ("sides does a square have", "four"), ("planets go around the sun", "eight")),
    ),
    FactFamily(
        ("What is a young {x} called?", "How do we call a young {x}?", "Which word means a young {x}?",
         "Name the word for a baby {x}."),
        "A young {x} is called a {y}.",
        (("dog", "puppy"), ("cat", "kitten"), ("cow", "calf"), ("sheep", "lamb"), ("horse", "foal"),
         ("frog", "tadpole"), ("goose", "gosling")),
    ),
    FactFamily(
        ("What is {x} made from?", "From what do people make {x}?", "Name the main thing that {x} is made from.",
         "Which raw material becomes {x}?"),
        "People make {x} from {y}.",
        (("bread", "flour"), ("cheese", "milk"), ("wine", "grapes"), ("paper", "wood"), ("glass", "sand"),
         ("butter", "cream")),
    ),
)  # fmt: skip
FACT_OPENINGS = ("", "Quick question: ", "For my quiz: ", "I forgot this: ", "Just curious: ", "A friend asks: ",
                 "Short one: ", "Help me: ")  # fmt: skip
FACT_CLOSINGS = ("", " Thanks!", " One sentence, please.", " I need it now.")


class Facts(Task):
    """A closed set of facts, asked in many ways. Held out: a fact with one way of asking."""

    name = "facts"
    _all: ClassVar = tuple((f, x, y) for f in FACT_FAMILIES for x, y in f.pairs)

    def sample(self, rng: random.Random) -> Item:
        family, x, y = rng.choice(self._all)
        question, opening, closing = rng.choice(family.questions), rng.choice(FACT_OPENINGS), rng.choice(FACT_CLOSINGS)
        prompt = opening + question.format(x=x) + closing
        return Item(prompt, family.answer.format(x=x, y=y), (x, question, opening, closing))


# ------------------------------------------------------------------------------------------------------------ stories
ANIMALS = ("fox", "rabbit", "bear", "owl", "mouse", "goat", "duck", "horse", "frog", "cat", "hen", "wolf", "otter",
           "squirrel")  # fmt: skip
STORY_PLACES = ("forest", "valley", "village", "desert", "harbor", "meadow", "castle", "swamp", "city", "farm")
TREASURES = ("lantern", "key", "drum", "kite", "bell", "map", "coat", "ring", "boat", "flute")
OPENINGS = (
    "Once upon a time, {a} {animal} named {name} lived in the {place}.",
    "Long ago, in the {place}, there was {a} {animal} called {name}.",
    "{name} was {a} {animal} from the {place}, and everybody liked {him}.",
    "In the middle of the {place} lived {a} {animal} whose name was {name}.",
    "This is the tale of {name}, {a} {animal} of the {place}.",
)
WISHES = (
    "More than anything, {name} loved {his} {adj} {thing}.",
    "{name} owned only one thing, {a_adj} {thing}.",
    "Every {time}, {name} cleaned {his} {adj} {thing} with great care.",
    "{name} had {a_adj} {thing} and showed it to every guest.",
    "For many years {name} had looked for {a_adj} {thing}, and now {he} had one.",
)
TROUBLES = (
    "One {weather} {time}, the {thing} was gone.",
    "But on {a_weather} {time}, a {thief} stole the {thing} and ran away.",
    "Then {a_weather} {time} came, and the wind carried the {thing} far away.",
    "One {time}, while {he} slept, the {thing} fell into the {water}.",
    "On {a_weather} {time}, {he} could not find the {thing} anywhere.",
)
SEARCHES = (
    "{name} looked behind every {spot}, but found nothing.",
    "At first {he} cried, and then {he} began to search under each {spot}.",
    "{He} asked the {helper} for help, and the two friends walked for {count} days.",
    '"I will not give up," said {name}, and {he} followed the path to the old {spot}.',
    'The {helper} heard about it and said, "Look near the {spot}, my friend."',
    "For {count} hours {he} walked around the {spot} and called for help.",
)
TURNS = (
    "There, beside a {spot}, sat a {helper} with something {adj} in its arms.",
    "Suddenly a {helper} came out of the dark and pointed to the {water}.",
    "Near the {water}, {he} met a {helper} who knew {count} secrets.",
    "At last {he} saw a light, and behind it stood the {thief}, cold and afraid.",
    "Just then the {weather} sky opened, and {he} could see all the way to the {water}.",
)
SOLUTIONS = (
    "{name} shared some {food} and got the {thing} back.",
    "With {count} brave jumps, {he} reached the {thing} and held it tight.",
    "They ate {food} together, laughed, and carried the {thing} home.",
    '"Take it," said a small voice, and the {thing} was in {his} hands again.',
    "Under some old {food} lay the {thing}, and it was not even broken.",
)
ENDINGS = (
    "From that day on, {name} was never alone in the {place} again.",
    "That night, the whole {place} danced until the {time} came back.",
    "And {name} the {animal} slept well, because a friend is worth more than {a_adj} {thing}.",
    "Since then, {name} tells this story to everyone who visits the {place}.",
    "So {name} learned that even {a} {animal} can be brave when it matters.",
)
STORY_WORDS = {
    "adj": ("golden", "silver", "tiny", "old", "blue", "shiny", "wooden", "magic", "broken", "red"),
    "time": ("morning", "evening", "night", "winter", "summer"),
    "weather": ("rainy", "foggy", "windy", "cold", "stormy", "quiet"),
    "thief": ("crow", "rat", "robber", "monkey", "magpie"),
    "water": ("river", "lake", "well", "sea", "pond"),
    "spot": ("tree", "stone", "bridge", "mill", "gate", "barn", "hill"),
    "helper": ("turtle", "beaver", "sailor", "baker", "child", "sparrow", "donkey"),
    "count": ("two", "three", "four", "five", "seven", "ten"),
    "food": ("bread", "cheese", "soup", "berries", "honey", "nuts", "cake"),
}
STORY_PROMPTS = (
    "Tell a story about {a} {animal} named {name} in the {place} who has a {thing}.",
    "Write a short story: {a} {animal} called {name}, the {place}, a {thing}.",
    "I want a story about {name} the {animal}, the {place} and a {thing}.",
)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _fill(rng: random.Random, template: str, fixed: dict[str, str]) -> str:
    """Fill one sentence; every free slot draws its own word, so no two sentences share a choice."""
    slots = {key: rng.choice(words) for key, words in STORY_WORDS.items()}
    slots |= {f"a_{key}": f"{_article(slots[key])} {slots[key]}" for key in ("adj", "weather")}
    return template.format(**fixed, **slots)


class Stories(Task):
    """Free text longer than one canvas. Held out: animal, name, place and thing together."""

    name = "stories"

    def sample(self, rng: random.Random) -> Item:
        name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
        place, thing = rng.choice(STORY_PLACES), rng.choice(TREASURES)
        female = name in HER
        fixed = {
            "name": name, "animal": animal, "place": place, "thing": thing, "a": _article(animal),
            "he": "she" if female else "he", "He": "She" if female else "He", "him": "her" if female else "him",
            "his": "her" if female else "his",
        }  # fmt: skip
        parts = (OPENINGS, WISHES, TROUBLES, SEARCHES, TURNS, SOLUTIONS, ENDINGS)
        answer = ""
        while not 66 <= len(answer.split()) <= 92:  # more than one canvas of 64 tokens, at most two
            answer = " ".join(_fill(rng, rng.choice(part), fixed) for part in parts)
        return Item(rng.choice(STORY_PROMPTS).format(**fixed), answer, (name, animal, place, thing))


# --------------------------------------------------------------------------------------------------------------- code
FUNCTION_NAMES = ("f", "g", "solve", "compute", "run", "work", "helper", "calc", "process", "task", "answer", "do_it")
MAPS = ("", "square", "plus", "minus", "times")
FILTERS = ("", "greater", "less", "even", "odd", "divisible", "unequal")
CHARACTER_SUFFIXES = ("!", "?", "-", "xy", "ab", "end")


def _map_words(kind: str, k: int) -> tuple[str, str]:
    """(phrase before "the numbers", Python expression in x)."""
    return {
        "": ("the numbers", "x"),
        "square": ("the squares of the numbers", "x * x"),
        "plus": (f"the numbers plus {k}", f"x + {k}"),
        "minus": (f"the numbers minus {k}", f"x - {k}"),
        "times": (f"the numbers times {k}", f"x * {k}"),
    }[kind]


def _filter_words(kind: str, k: int) -> tuple[str, str]:
    """(phrase after "the numbers", Python condition in x)."""
    return {
        "": ("", ""),
        "greater": (f" that are greater than {k}", f" if x > {k}"),
        "less": (f" that are less than {k}", f" if x < {k}"),
        "even": (" that are even", " if x % 2 == 0"),
        "odd": (" that are odd", " if x % 2 == 1"),
        "divisible": (f" that are divisible by {k}", f" if x % {k} == 0"),
        "unequal": (f" that are not {k}", f" if x != {k}"),
    }[kind]


def _code_pipeline(r: random.Random) -> tuple[str, str, str]:
    mapping, condition = r.choice(MAPS), r.choice(FILTERS)
    what, expression = _map_words(mapping, r.randint(2, 9))
    which, test = _filter_words(condition, r.randint(3, 9) if condition == "divisible" else r.randint(2, 30))
    loop = f"{expression} for x in xs{test}"
    phrase, body = r.choice(
        (
            ("the sum of", f"sum({loop})"),
            ("a list of", f"[{loop}]"),
            ("the largest of", f"max({loop})"),
            ("the smallest of", f"min({loop})"),
        )
    )
    return "list xs", f"{phrase} {what}{which}", f"    return {body}"


def _code_branch(r: random.Random) -> tuple[str, str, str]:
    k, m = r.randint(2, 50), r.choice((">", "<", "=="))
    name = {">": "greater than", "<": "less than", "==": "equal to"}[m]
    values = []
    for word, sign in r.sample((("plus", "+"), ("minus", "-"), ("times", "*")), 2):
        n = r.randint(2, 9)
        values.append((f"x {word} {n}", f"x {sign} {n}"))
    (then_words, then), (else_words, other) = values
    body = f"    if x {m} {k}:\n        return {then}\n    return {other}"
    return "number x", f"{then_words} if x is {name} {k} and {else_words} otherwise", body


def _code_text(r: random.Random) -> tuple[str, str, str]:
    k, suffix = r.randint(2, 9), r.choice(CHARACTER_SUFFIXES)
    words, expression = r.choice(
        (
            (f"the first {k} characters of s", f"s[:{k}]"),
            (f"the last {k} characters of s", f"s[-{k}:]"),
            (f"s without its first {k} characters", f"s[{k}:]"),
            (f"every character of s from number {k} in reverse", f"s[{k}:][::-1]"),
            (f"s repeated {k} times", f"s * {k}"),
        )
    )
    case_words, case = r.choice((("", ""), (" in capitals", ".upper()"), (" in small letters", ".lower()")))
    tail_words, tail = r.choice((("", ""), (f' followed by "{suffix}"', f' + "{suffix}"')))
    if case and "*" in expression:
        expression = f"({expression})"
    return "string s", f"{words}{case_words}{tail_words}", f"    return {expression}{case}{tail}"


def _code_loop(r: random.Random) -> tuple[str, str, str]:
    k, start = r.randint(2, 9), r.randint(1, 9)
    which, test = r.choice(
        ((f" divisible by {k}", f"i % {k} == 0"), (f" not divisible by {k}", f"i % {k} != 0"), ("", ""))
    )
    words, update = r.choice(
        (("sum of the numbers", "total += i"), ("sum of the squares", "total += i * i"), ("count", "total += 1"))
    )
    what = f"the {words} from {start} to n{which}"
    inner = f"        if {test}:\n            {update}" if test else f"        {update}"
    body = f"    total = 0\n    for i in range({start}, n + 1):\n{inner}\n    return total"
    return "number n", what, body


def _code_pair(r: random.Random) -> tuple[str, str, str]:
    k, m = r.randint(2, 9), r.randint(2, 30)
    words, expression = r.choice(
        (
            (f"a times {k} plus b", f"a * {k} + b"),
            (f"a plus b times {k}", f"a + b * {k}"),
            (f"the sum of a and b, times {k}", f"(a + b) * {k}"),
            (f"the difference of a and b, times {k}", f"(a - b) * {k}"),
            (f"the larger of a and b, plus {m}", f"max(a, b) + {m}"),
            (f"the smaller of a and b, minus {m}", f"min(a, b) - {m}"),
            (f"whether a plus b is greater than {m}", f"a + b > {m}"),
            (f"whether a times {k} is equal to b", f"a * {k} == b"),
            (f"the remainder of a plus {m} divided by {k}", f"(a + {m}) % {k}"),
        )
    )
    return "number a and a number b", words, f"    return {expression}"


CODE_KINDS = (_code_pipeline, _code_branch, _code_text, _code_loop, _code_pair)


class Code(Task):
    """Tiny Python functions. Held out: the required behaviour."""

    name = "code"

    def sample(self, rng: random.Random) -> Item:
        signature, what, body = rng.choice(CODE_KINDS)(rng)
        function = rng.choice(FUNCTION_NAMES)
        arguments = ", ".join(part.split()[-1] for part in signature.split(" and a "))
        prompt = f"Write a Python function {function} that takes a {signature} and returns {what}."
        return Item(prompt, f"def {function}({arguments}):\n{body}", (signature, what))


TASKS: dict[str, Task] = {t.name: t for t in (Arithmetic(), Edit(), Lists(), Facts(), Stories(), Code())}
