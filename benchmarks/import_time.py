"""What importing the package costs beyond torch: medians over new interpreters.

    python benchmarks/import_time.py --repeats 11

The package root imports neither torch nor a host; each public name is imported at its first use, which is not
measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIMIT = 0.1
"""Seconds that the package may take beyond torch."""

ROOT = Path(__file__).resolve().parent.parent

MEASURE = """
import json, sys, time
times = []
for name in sys.argv[1:]:
    started = time.perf_counter()
    __import__(name)
    times.append(time.perf_counter() - started)
print(json.dumps(times))
"""


def measure(*modules: str) -> list[float]:
    """Seconds that each import takes, one after another, in a new interpreter."""
    command = [sys.executable, "-c", MEASURE, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11, help="interpreters per measurement (default: 11)")
    repeats = parser.parse_args().repeats

    alone, together, beyond = [], [], []
    measure("torch", "megatron_fp8_dist")  # the disk's cache, and the bytecode
    for _ in range(repeats):
        alone.append(sum(measure("torch")))
        torch, package = measure("torch", "megatron_fp8_dist")
        together.append(torch + package)
        beyond.append(package)

    table = Table(title=f"Seconds to import, {repeats} interpreters each")
    table.add_column("import")
    for name in ("median", "least", "most"):
        table.add_column(name, justify="right")
    rows = {"torch": alone, "torch, megatron_fp8_dist": together, "megatron_fp8_dist after torch": beyond}
    for name, times in rows.items():
        table.add_row(name, *(f"{value:.4f}" for value in (statistics.median(times), min(times), max(times))))
    console = Console()
    console.print(table)
    extra = statistics.median(beyond)
    verdict = "within" if extra <= LIMIT else "above"
    console.print(f"{extra:.4f} s beyond torch: {verdict} the limit of {LIMIT} s")


if __name__ == "__main__":
    main()
