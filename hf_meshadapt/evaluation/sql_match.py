"""Whether a query that a model wrote returns what the reference query returns, on a sqlite database that it cannot change.

It may read tables and call sqlite's functions, and nothing else: no writing, attaching, pragmas or extensions. Time, rows
and the length of values are limited.
"""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing

SECONDS = 5.0
NUM_ROWS = 100_000
VALUE_BYTES = 1_000_000
STEPS_BETWEEN_LOOKS = 10_000  # instructions of sqlite's machine, some milliseconds
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def execution_match(answer: str, reference: str, *, script: str | None = None, path: str | None = None) -> bool:
    """Whether both queries return the same rows: in order where the reference orders them, else in any order.

    Columns are compared by place, whatever they are called.

    Args:
        answer: what the model wrote; see `query_of`.
        reference: a query that must work.
        script: SQL statements that make the database, or
        path: of a sqlite file.

    Raises:
        ValueError: the reference does not work on this database.
    """
    with closing(_opened(script, path)) as database:
        try:
            expected = _rows(database, reference)
        except sqlite3.Error as error:
            raise ValueError(
                f"the reference query {reference!r} fails ({error}): check that it belongs to this database"
            ) from error
        try:
            found = _rows(database, query_of(answer))
        except (sqlite3.Error, sqlite3.Warning):
            return False
    if re.search(r"\border\s+by\b", reference, re.I):
        return found == expected
    return sorted(found, key=repr) == sorted(expected, key=repr)


def query_of(answer: str) -> str:
    """The first statement of an answer, without the code fence that may be around it."""
    fenced = re.search(r"```(?:sql|sqlite)?\s*\n(.*?)(?:```|\Z)", answer, re.S | re.I)
    return (fenced[1] if fenced else answer).split(";")[0].strip()


def _opened(script: str | None, path: str | None) -> sqlite3.Connection:
    if path is None:
        database = sqlite3.connect(":memory:")
        database.executescript(script or "")
    else:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    database.text_factory = lambda value: value.decode("utf-8", "replace")  # some of Spider's are of other encodings
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
    return database


def _rows(database: sqlite3.Connection, query: str) -> list[tuple]:
    deadline = time.monotonic() + SECONDS
    database.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_BETWEEN_LOOKS)
    cursor = database.execute(query)
    if cursor.description is None:  # else no query would match one that finds nothing
        raise sqlite3.ProgrammingError("there is no query in it")
    rows = cursor.fetchmany(NUM_ROWS + 1)
    if len(rows) > NUM_ROWS:
        raise sqlite3.OperationalError(f"more than {NUM_ROWS} rows")
    # 2 and 2.0 are one number, and a sum's last bits are not the query's.
    return [tuple(round(float(v), 6) if isinstance(v, int | float) else v for v in row) for row in rows]
