#!/usr/bin/env python3
"""Measure when `ask` answers and when it refuses, and choose the threshold.

    python3 notes/calibrate.py SETS [--questions 200] [--base zh_faq ...]

SETS is a folder of question sets (NAME/corpus.jsonl.gz, queries.jsonl.gz).  Each set
in turn is the knowledge base; its own questions ought to be answered, those of other
sets in the same language refused.  Printed are

    answered   share of its own questions that are answered, at the default threshold
    holds      share of its own questions whose extract holds a known answer, where the
               set has answers, with the mean length of the extract in characters
    refused    share of another set's questions that are refused
    the curve  the same shares at other thresholds, worst base first
    held back  the threshold that the other bases would choose, and its shares here
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OTHERS = {          # base -> the sets whose questions it cannot answer
    "en_squad": ("en_faq", "en_docs"),
    "en_faq": ("en_squad",),
    "en_docs": ("en_squad",),
    "en_cranfield": ("en_squad", "en_faq"),
    "code_ant": ("en_squad", "en_cranfield"),
    "zh_cmrc": ("zh_drcd", "zh_faq"),
    "zh_drcd": ("zh_cmrc", "zh_faq"),
    "zh_faq": ("zh_cmrc", "zh_drcd"),
}
ANSWERED_AIM, REFUSED_AIM = 0.90, 0.80


def load_tool(path):
    """Import lightrag.py by its path."""
    spec = importlib.util.spec_from_file_location("lightrag_calibrated", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_lines(folder, stem):
    """Return the records of one gzipped JSONL file."""
    with gzip.open(os.path.join(folder, f"{stem}.jsonl.gz"), "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def sample(folder, most):
    """Return the same questions each time, spread over the set."""
    def _digest(question):
        return hashlib.md5(question["id"].encode()).hexdigest()
    return sorted(read_lines(folder, "queries"), key=_digest)[:most]


def build(tool, folder):
    """Return a knowledge base in memory of a set's documents."""
    base = tool.Knowledge(None)
    for document in read_lines(folder, "corpus"):
        text = document["text"] or document["title"]
        if text.strip():
            base.add_text(text, source=document["id"], title=document["title"] or "")
    return base


def coverages(tool, base, questions):
    """Return [(coverage, what is shown)] of questions."""
    rows = []
    for question in questions:
        hits = base.search(question["text"], tool.HITS)
        coverage, excerpts = tool.best_excerpts(question["text"], hits, base.idf)
        shown = tool.lay_out(excerpts).text if excerpts else ""
        rows.append((coverage, shown))
    return rows


def share(rows, threshold, answered):
    """Return the share of rows on one side of a threshold."""
    return sum((coverage >= threshold) == answered for coverage, _ in rows) / len(rows)


def worst(tables, threshold):
    """Return (least answered, least refused) over the bases at a threshold."""
    answered = [share(own, threshold, True) for own, _ in tables]
    refused = [share(rows, threshold, False)
               for _, foreign in tables for rows in foreign.values()]
    return min(answered), min(refused)


def choose(tables):
    """Return the threshold whose worst shares lie furthest above both aims."""
    def _room(threshold):
        answered, refused = worst(tables, threshold)
        # A point of what is answered is worth two of what is refused: the aims leave
        # 10 points of loss for the one and 20 for the other.
        return min((answered - ANSWERED_AIM) / 0.1, (refused - REFUSED_AIM) / 0.2)
    return max((i / 100 for i in range(15, 70)), key=_room)


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--base", nargs="*", default=list(OTHERS))
    parser.add_argument("--tool", default=os.path.join(HERE, "..", "lightrag.py"))
    options = parser.parse_args()
    tool, results = load_tool(options.tool), {}
    questions = {
        name: sample(os.path.join(options.sets, name), options.questions)
        for name in {*options.base, *(o for b in options.base for o in OTHERS[b])}
    }
    default = tool.ANSWER_COVERAGE_MIN
    print(f"threshold {default}\nbase          answered  holds (chars)  refused")
    for name in options.base:
        base = build(tool, os.path.join(options.sets, name))
        own = coverages(tool, base, questions[name])
        foreign = {o: coverages(tool, base, questions[o]) for o in OTHERS[name]}
        results[name] = own, foreign
        known = [(row[1], q["answers"]) for row, q in zip(own, questions[name])
                 if name in ("en_squad", "zh_cmrc", "zh_drcd")]
        held = sum(any(a in shown for a in answers) for shown, answers in known)
        size = sum(len(shown) for _, shown in own) / len(own)
        holds = f"{held / len(known):.3f}" if known else "    -"
        refused = "  ".join(
            f"{o} {share(rows, default, False):.3f}" for o, rows in foreign.items()
        )
        print(f"{name:13} {share(own, default, True):8.3f}  {holds} ({size:4.0f})  "
              f"{refused}", flush=True)
    print("\nthreshold  least answered  least refused")
    for i in range(20, 62, 2):
        answered, refused = worst(results.values(), i / 100)
        print(f"{i / 100:9.2f}  {answered:14.3f}  {refused:13.3f}")
    print(f"chosen: {choose(results.values()):.2f}\n\nheld back   chosen  answered  refused")
    for name, (own, foreign) in results.items():
        chosen = choose([table for other, table in results.items() if other != name])
        answered, refused = worst([(own, foreign)], chosen)
        print(f"{name:13} {chosen:.2f}  {answered:8.3f}  {refused:7.3f}")


if __name__ == "__main__":
    main()
