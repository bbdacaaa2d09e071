"""Writes recipes/word_problems.jsonl: 600 word problems in small whole numbers, half of one step and half of two.

    python recipes/make_word_problems.py

Every run writes the same file. A row has the question, its answer as text, and the number of steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

PATH = Path(__file__).with_name("word_problems.jsonl")
NAMES = (
    "Ada", "Ben", "Chen", "Dina", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jia",
    "Kofi", "Lena", "Marco", "Nia", "Omar", "Priya", "Rosa", "Sven", "Tara", "Yusuf",
)  # fmt: skip
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "pears", "shells", "stamps", "stickers")


def one_step(rng: random.Random) -> list[tuple[str, int]]:
    """(question, answer) of each kind, all with the same names and numbers."""
    (name, other), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b, few, many = rng.randint(5, 60), rng.randint(5, 60), rng.randint(2, 9), rng.randint(3, 12)
    more, less = max(a, b) + 1, min(a, b)
    return [
        (f"{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?", a + b),
        (f"{name} had {more} {things} and gave {less} of them to {other}. How many are left?", more - less),
        (f"{name} has {few} boxes with {many} {things} in each. How many {things} is that?", few * many),
        (f"{name} shares {few * many} {things} equally among {few} friends. How many does each get?", many),
        (f"A book has {more} pages. {name} has read {less}. How many pages are still to read?", more - less),
        (f"One ticket costs {many} dollars. What do {few} tickets cost, in dollars?", few * many),
        (f"{name} is {less} years old and {other} is {few} years older. How old is {other}?", less + few),
        (f"A train has {few} cars with {many + 20} seats each. How many seats does it have?", few * (many + 20)),
        (f"{name} walked {a} steps before lunch and {b} steps after it. How many steps is that?", a + b),
        (f"A rope of {few * many} metres is cut into pieces of {few} metres. How many pieces are there?", many),
    ]


def two_steps(rng: random.Random) -> list[tuple[str, int]]:
    """(question, answer) of each kind, all with the same names and numbers."""
    (name, other), things = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b, few, many = rng.randint(5, 40), rng.randint(5, 40), rng.randint(2, 9), rng.randint(3, 12)
    total, gone = few * many, rng.randint(1, few * many)
    return [
        (f"{name} buys {few} bags of {many} {things} and has {a} more at home. How many is that in all?", total + a),
        (f"{name} had {total} {things}, lost {gone}, and then found {a}. How many are there now?", total - gone + a),
        (f"{name} has {a} {things}. {other} has {few} times as many. How many do they have together?", a + few * a),
        (f"A shop has {few} shelves with {many} {things} each and sells {gone}. How many are left?", total - gone),
        (
            f"{name} earns {many} dollars an hour, works {few} hours and spends {gone} dollars. How much is left?",
            total - gone,
        ),
        (f"{name} has {a} {things} and {other} has {b}. They give away {few}. How many are left?", a + b - few),
        (f"There are {a + b} people in a bus. {b} get off and {few} get on. How many are in it then?", a + few),
        (f"A book has {total + b} pages. {name} reads {many} pages a day for {few} days. How many are left?", b),
        (
            f"A pen costs {few} dollars and a notebook {many} dollars. What do 2 pens and 3 notebooks cost?",
            2 * few + 3 * many,
        ),
        (
            f"{few} children share {total} {things} equally, and each child eats 2. How many does each have left?",
            many - 2,
        ),
    ]


def problems(count: int) -> Iterator[dict[str, object]]:
    """``count`` rows, no question twice; steps and kinds take turns."""
    rng = random.Random("word problems")
    seen: set[str] = set()
    turn = 0
    while len(seen) < count:
        steps, kind = 1 + turn % 2, turn // 2 % 10
        question, answer = (one_step, two_steps)[steps - 1](rng)[kind]
        turn += 1
        if question not in seen:
            seen.add(question)
            yield {"id": f"word_problem/{len(seen)}", "prompt": question, "answer": str(answer), "steps": steps}


def main() -> None:
    PATH.write_text("".join(json.dumps(row) + "\n" for row in problems(600)), encoding="utf-8")
    print(f"{PATH.name}: {PATH.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
