#!/usr/bin/env python3
"""Measure when `ask` answers and when it refuses, and choose the threshold.

    python3 notes/calibrate.py SETS [--questions 200] [--base zh_faq ...]
                                    [--documents 40]

SETS is a folder of question sets (NAME/corpus.jsonl.gz, queries.jsonl.gz).  Each set
in turn is the knowledge base; its own questions ought to be answered, those of other
sets in the same language refused.  With --documents the bases are small: parts of a set
with about so many documents each, and the questions about these.  Printed are

    answered   share of its own questions that are answered, at the default threshold
    refused    share of another set's questions that are refused
    renamed    share refused of its own questions whose exact names (X200, get_user) are
               put in other letters and digits, so that they ask for what is nowhere
    the curve  the least of these shares where more coverage is needed, or less (room)
    held back  the room that the other bases would choose, and its shares here
    holds      share of questions whose extract holds a known answer (or, where a set has
               none, shows some of the passage that does), and its mean characters
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
WITH_ANSWERS = ("en_squad", "long_en", "long_docs", "long_code", "zh_cmrc", "zh_drcd",
                "long_zh")
ANSWERED_AIM, REFUSED_AIM = 0.90, 0.80
PARTS_MAX = 8       # of a set, as small bases


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


def build(tool, folder, only=None):
    """Return a knowledge base in memory of a set's documents, or those of some ids."""
    base = tool.Knowledge(None)
    for document in read_lines(folder, "corpus"):
        text = document["text"] or document["title"]
        if text.strip() and (only is None or document["id"] in only):
            base.add_text(text, source=document["id"], title=document["title"] or "")
    return base


def parts(tool, folder, questions, documents):
    """Yield (knowledge base, the questions about it): the whole set, or small parts."""
    if not documents:
        yield build(tool, folder), questions
        return
    judged, ids, asked, made = tool.read_set(folder).judgements, set(), [], 0
    for question in questions:
        ids |= set(list(judged.get(question["id"], ()))[:2])
        asked.append(question)
        if len(ids) >= documents and made < PARTS_MAX:
            yield build(tool, folder, ids), asked
            ids, asked, made = set(), [], made + 1


def extracts(tool, base, questions):
    """Yield (room, Answer) of questions: its coverage, less what is needed."""
    needed = tool.coverage_needed(base.idf)
    for question in questions:
        hits = base.search(question["text"], tool.HITS)
        coverage, excerpts = tool.best_excerpts(
            base.corrected(question["text"]), hits, base.idf)
        shown = tool.lay_out(excerpts) if excerpts else tool.Answer("", True)
        yield coverage - needed, shown


def renamed(tool, questions):
    """Return the questions that have exact names, with others in their place."""
    signs = "abcdefghijklmnopqrstuvwxyz", "0123456789"
    turned = str.maketrans({a: b for row in (*signs, signs[0].upper())
                            for a, b in zip(row, row[-3:] + row[:-3])})
    asked = []
    for question in questions:
        text = question["text"]
        for word in filter(tool.EXACT_NAME.fullmatch, tool.words_of(text)):
            keep = 2 if word.isdigit() else 0       # the century, of a year
            text = text.replace(word, word[:keep] + word[keep:].translate(turned))
        if text != question["text"]:
            asked.append({**question, "text": text})
    return asked


def holds(question, answer):
    """Tell whether an extract holds a known answer of its question."""
    if question.get("answers"):
        return any(known in answer.text for known in question["answers"])
    return any(
        cited.hit.source == source and cited.hit.start < end and start < cited.hit.end
        for cited in answer.citations for source, start, end in question["spans"]
    )


def share(rows, threshold, answered):
    """Return the share of rooms on one side of a threshold."""
    return sum((room >= threshold) == answered for room in rows) / max(1, len(rows))


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
    return max((i / 100 for i in range(-16, 40)), key=_room)


def print_shares(tool, sets, bases, questions, documents):
    """Print what each base answers and refuses; -> {base: (own, {other: foreign})}."""
    tables = {}
    print("base          answered  refused")
    for name in bases:
        own, others, foreign = [], [], {other: [] for other in OTHERS[name]}
        folder = os.path.join(sets, name)
        for base, asked in parts(tool, folder, questions(name), documents):
            own += [room for room, _ in extracts(tool, base, asked)]
            others += [room for room, _ in extracts(tool, base, renamed(tool, asked))]
            for other, rows in foreign.items():
                rows += [room for room, _ in extracts(tool, base, questions(other))]
        tables[name] = own, foreign
        refused = "  ".join(f"{other} {share(rows, 0.0, False):.3f}"
                            for other, rows in foreign.items())
        refused += f"  renamed {share(others, 0.0, False):.3f} of {len(others)}"
        print(f"{name:13} {share(own, 0.0, True):8.3f}  {refused}", flush=True)
    return tables


def print_curve(tables):
    """Print the worst shares at each threshold, and what held-back bases get."""
    print("\n     room  least answered  least refused")
    for i in range(-12, 14, 2):
        answered, refused = worst(tables.values(), i / 100)
        print(f"{i / 100:+9.2f}  {answered:14.3f}  {refused:13.3f}")
    print(f"chosen: {choose(tables.values()):+.2f}\n\nheld back   chosen  answered  refused")
    for name, table in tables.items():
        chosen = choose([tables[other] for other in tables if other != name])
        answered, refused = worst([table], chosen)
        print(f"{name:13} {chosen:+.2f}  {answered:8.3f}  {refused:7.3f}")


def print_holds(tool, sets, questions):
    """Print how often what is shown holds a known answer."""
    print("\nset           holds  characters")
    shares = []
    for name in WITH_ANSWERS:
        base = build(tool, os.path.join(sets, name))
        shown = [answer for _, answer in extracts(tool, base, questions(name))]
        held = list(map(holds, questions(name), shown))
        shares.append(sum(held) / len(held))
        characters = sum(len(answer.text) for answer in shown) / len(shown)
        print(f"{name:13} {shares[-1]:.3f}  {characters:10.0f}", flush=True)
    print(f"{'mean':13} {sum(shares) / len(shares):.3f}")


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--base", nargs="*", default=list(OTHERS))
    parser.add_argument("--tool", default=os.path.join(HERE, "..", "lightrag.py"))
    options = parser.parse_args()

    def _questions(name):
        return sample(os.path.join(options.sets, name), options.questions)

    tool = load_tool(options.tool)
    print_curve(print_shares(tool, options.sets, options.base, _questions,
                             options.documents))
    if not options.documents:
        print_holds(tool, options.sets, _questions)


if __name__ == "__main__":
    main()
