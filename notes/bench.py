"""Measure lightrag.py beside other engines, and write notes/measured-SIZE.md.

    make bench                              10,000 chunks, 400 questions a set
    SIZE=100000 QUESTIONS=0 make bench      the large table, all questions

The harnesses, speed.py and peers.py with their judged sets, are looked for in $BENCH,
else in ../shared/bench and ../bench beside the repository.  Other engines are installed
into $PEERS (a virtual environment, by default in the folder for temporary files).
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
TOOL = os.path.join(ROOT, "lightrag.py")
SCRATCH = os.path.join(tempfile.gettempdir(), "lightrag-bench")
PACKAGES = ["rank_bm25", "bm25s", "PyStemmer", "jieba", "tantivy"]
SPEED_ENGINES = "noop,lightrag,tantivy,bm25s,py_fast"
QUALITY_SYSTEMS = "lightrag,seed,bm25s,tantivy"
SETS = ["code_ant", "en_cisi", "en_cranfield", "en_docs", "en_faq", "en_squad", "mixed", "zh_cmrc", "zh_drcd", "zh_faq"]
RUNS = 9        # of each command; the median counts


def find_harnesses():
    """Return the folder that holds speed.py and peers.py, or None."""
    places = [os.environ.get("BENCH", ""), os.path.join(ROOT, "..", "shared", "bench"),
              os.path.join(ROOT, "..", "bench")]
    return next((os.path.realpath(place) for place in places
                 if place and os.path.exists(os.path.join(place, "speed.py"))), None)


def peers_python():
    """Return a Python with the other engines, or this one when none can be had."""
    folder = os.environ.get("PEERS", os.path.join(SCRATCH, "peers"))
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(python):
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", *PACKAGES]
        if subprocess.run(install, check=False).returncode:
            print("the other engines cannot be installed: measured without")
    return python


def run(command):
    """Run a command, show its output as it comes, return it."""
    lines = []
    environ = {**os.environ, "LIGHTRAG": TOOL}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environ
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return lines


def cpu_ms(command, folder=None):
    """Return the CPU time of a command, in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def measure_starts(home, questions):
    """Return lines: what starting costs, and a search from a cold start.

    Round by round, so that what else the machine does is shared by all.
    """
    tool = [sys.executable, TOOL]
    commands = [[sys.executable, "-c", "pass"], [*tool, "--version"],
                *([*tool, "--home", home, "search", text] for text in questions)]
    rounds = [[cpu_ms(command) for command in commands] for _ in range(RUNS)]
    bare, version, *searches = map(statistics.median, zip(*rounds))
    search = statistics.median(searches)
    return [
        f"python -c pass               {bare:6.1f} ms of CPU",
        f"--version                    {version:6.1f} ms, {version - bare:+.1f}",
        f"search                       {search:6.1f} ms, {search - version:+.1f} more",
    ]


def measure_sync(base, folder):
    """Return lines: what a change of one document costs in a large base."""
    home = os.path.join(folder, ".lightrag")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, home)
    note = os.path.join(folder, "note.md")
    rows = []
    for text in ("# Zebra\nthe first version", "# Zebra\nthe second version"):
        with open(note, "w", encoding="utf-8") as file:
            file.write(text)
        verb = "sync" if rows else "add"
        command = [sys.executable, TOOL, "--home", home, verb, "note.md", "-y"]
        cpu = cpu_ms(command, folder)
        rows.append(f"{verb + ' of one file':<29}{cpu:6.0f} ms of CPU")
    return rows


def main():
    """Run the harnesses and write what they say."""
    harnesses = find_harnesses()
    if harnesses is None:
        sys.exit("no harness found: set BENCH to the folder that holds speed.py")
    size, questions = os.environ.get("SIZE", "10000"), os.environ.get("QUESTIONS", "400")
    python, work = peers_python(), os.path.join(SCRATCH, "speed")
    speed = []
    for again in ([], ["--reuse"], ["--reuse"]):     # one build, three times the questions
        speed += run([python, os.path.join(harnesses, "speed.py"), "--work", work,
                      "--engines", SPEED_ENGINES, "--sizes", size, *again])
    with open(os.path.join(work, "questions-200.json"), encoding="utf-8") as file:
        asked = json.load(file)[:7]
    base = os.path.join(work, f"lightrag-{size}")
    starts = measure_starts(base, asked)
    starts += measure_sync(base, os.path.join(SCRATCH, "sync"))
    print(*starts, sep="\n")
    quality = run([python, os.path.join(harnesses, "peers.py"), *SETS,
                   "--systems", QUALITY_SYSTEMS, "--max-queries", questions])
    tables = [
        ("Speed", f"SIZE={size} make bench", speed),
        ("One command from a cold start", "the same run", starts),
        ("Quality", f"QUESTIONS={questions} make bench", quality),
    ]
    path = os.path.join(HERE, f"measured-{size}.md")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"# Measured by `make bench`, {size} chunks\n\n"
                   f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, "
                   f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores. "
                   "CPU time, so that other work on the machine disturbs least.\n")
        for title, command, lines in tables:
            file.write(f"\n## {title}\n\n`{command}`\n\n```\n")
            file.write("\n".join(lines) + "\n```\n")


if __name__ == "__main__":
    main()
