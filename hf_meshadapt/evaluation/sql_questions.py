"""Questions about small made-up tables with the queries that answer them: a test of SQL that needs no data set.

Not a benchmark: tables and questions come out of few patterns. The same numbers come out on every machine.
"""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing

NUM_PEOPLE, NUM_SALES = 24, 60
TEAMS = ("Sales", "Support", "Research", "Finance")
CITIES = ("Lisbon", "Oslo", "Turin", "Ghent", "Cork")
NAMES = tuple("Ada Ben Cleo Dan Eve Finn Gus Hana Ivo Jan Kim Lena Max Nora Otto Pia Quin Rosa Sam Tess".split())  # noqa: SIM905
PRODUCTS = ("pens", "lamps", "chairs", "desks", "clocks")
SCHEMA = """CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, team TEXT, city TEXT, salary INTEGER, hired INTEGER);
CREATE TABLE sales (id INTEGER PRIMARY KEY, person_id INTEGER REFERENCES people(id), product TEXT, amount INTEGER);"""


def sql_questions(seed: int = 0) -> list[dict[str, str]]:
    """Rows with `schema`, `script` (which makes the database), `question` and `query`, which finds something."""
    script = database_script(random.Random(seed))
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(script)
        found = {query: database.execute(query).fetchall() for _, query in _questions()}
    return [
        {"schema": SCHEMA, "script": script, "question": question, "query": query}
        for question, query in _questions()
        if found[query] not in ([], [(None,)])  # a wrong query finds nothing too often
    ]


def database_script(numbers: random.Random) -> str:
    people = [
        f"INSERT INTO people VALUES ({index}, '{numbers.choice(NAMES)}', '{numbers.choice(TEAMS)}', "
        f"'{numbers.choice(CITIES)}', {100 * numbers.randint(20, 90)}, {numbers.randint(2001, 2024)});"
        for index in range(1, NUM_PEOPLE + 1)
    ]
    sales = [
        f"INSERT INTO sales VALUES ({index}, {numbers.randint(1, NUM_PEOPLE)}, '{numbers.choice(PRODUCTS)}', "
        f"{numbers.randint(1, 40)});"
        for index in range(1, NUM_SALES + 1)
    ]
    return "\n".join([SCHEMA, *people, *sales])


def _questions() -> list[tuple[str, str]]:
    """From one table to joins with groups; in an order that mixes them, so that a few of the first are a fair sample."""
    joined = "sales JOIN people ON sales.person_id = people.id"
    by_pattern = [
        [(f"How many people are in the team {team}?", f"SELECT COUNT(*) FROM people WHERE team = '{team}'")
         for team in TEAMS],
        [(f"What is the average salary of people in {city}?", f"SELECT AVG(salary) FROM people WHERE city = '{city}'")
         for city in CITIES],
        [(f"List the names of people hired after {year}, the best paid first.",
          f"SELECT name FROM people WHERE hired > {year} ORDER BY salary DESC, id") for year in (2010, 2015, 2018, 2020)],
        [(f"How many {product} were sold in all?", f"SELECT SUM(amount) FROM sales WHERE product = '{product}'")
         for product in PRODUCTS],
        [(f"What is the highest salary in the team {team}?", f"SELECT MAX(salary) FROM people WHERE team = '{team}'")
         for team in TEAMS],
        [(f"How many different people sold {product}?",
          f"SELECT COUNT(DISTINCT person_id) FROM sales WHERE product = '{product}'") for product in PRODUCTS],
        [(f"How many {product} did people in {city} sell?",
          f"SELECT SUM(amount) FROM {joined} WHERE product = '{product}' AND city = '{city}'")
         for product, city in zip(PRODUCTS, CITIES)],
        [(f"For every team, how many {product} did its people sell?",
          f"SELECT team, SUM(amount) FROM {joined} WHERE product = '{product}' GROUP BY team") for product in PRODUCTS],
        [(f"Which cities have more than {least} people?",
          f"SELECT city FROM people GROUP BY city HAVING COUNT(*) > {least}") for least in (3, 4, 5)],
        [(f"Which people in the team {team} sold nothing? Give their ids.",
          f"SELECT id FROM people WHERE team = '{team}' AND id NOT IN (SELECT person_id FROM sales)") for team in TEAMS],
    ]  # fmt: skip
    longest = max(map(len, by_pattern))
    return [pattern[place] for place in range(longest) for pattern in by_pattern if place < len(pattern)]
