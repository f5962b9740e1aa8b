"""What `import hf_meshadapt` costs on top of a bare interpreter. Target: under 0.3 s."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.common import print_table, quartiles, write_result


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    repetitions = parser.parse_args().repetitions
    seconds("import hf_meshadapt")  # Writes the bytecode cache.
    samples = [(seconds("pass"), seconds("import hf_meshadapt")) for _ in range(repetitions)]
    bare, imported = map(list, zip(*samples))
    extra = [with_import - without for without, with_import in samples]
    low, median, high = quartiles(extra)
    row = {
        "statement": "import hf_meshadapt",
        "import_seconds_median": median,
        "import_seconds_quartiles": [low, high],
        "bare_interpreter_seconds_median": quartiles(bare)[1],
        "with_import_seconds_median": quartiles(imported)[1],
        "bare_interpreter_seconds": bare,
        "with_import_seconds": imported,
    }
    print_table([row], ["statement", "import_seconds_median", "bare_interpreter_seconds_median"])
    print(write_result("import_time", [row], []).name)


if __name__ == "__main__":
    main()
