#!/usr/bin/env python3
"""Measure how well the checking of answers tells true claims from falsified ones.

    python3 notes/check_claims.py SETS [--pairs 100] [--set en_squad zh_drcd ...]

SETS is a folder of question sets (NAME/corpus.jsonl.gz, queries.jsonl.gz, qrels.tsv).
A true pair is a sentence of a passage that answers a question, and that passage.  It is
falsified in four ways: a number changed, a name changed (for one of the same kind),
another passage of the set cited, a negation added.  Every falsified pair has its true
one, so precision is of as many of each.  Printed are for each set and kind

    pairs      how many could be made (of each, true and falsified)
    precision  share of what is called unsupported that is falsified
    recall     share of the falsified that is called unsupported

and, where the set has answers in a writer's own words, the share of these that passes.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from calibrate import build, load_tool, sample

SETS = ("en_squad", "zh_cmrc", "en_faq", "en_docs", "zh_drcd", "zh_faq")
NAME_EN = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})*")
ASKS_NAME = re.compile("谁|誰|哪|什么人|什麼人|何人")
DIGITS = re.compile(r"(?<![\w.])\d+(?![\w.])|(?<=[一-鿿])\d+(?=[一-鿿])")
SIGNS = "一二三四五六七八九"
CHINESE = re.compile(f"[{SIGNS}](?=[年月日个個次人名种種])")
VERB_EN = re.compile(r"\b(is|are|was|were|can|could|will|has|had|have|would|should)\b")
VERB_ZH = re.compile("(?=是|有|能|可以|会|會)")


def answering_passages(tool, folder, base, most):
    """Yield (question, hits): the chunks of its judged passages that fit it best."""
    judged = {}
    with open(os.path.join(folder, "qrels.tsv"), encoding="utf-8") as file:
        for line in file:
            name, source, grade = line.split("\t")
            if int(grade) > 0:
                judged.setdefault(name, []).append(source)
    for question in sample(folder, most):
        sources = judged.get(question["id"], ())
        hits = [hit for hit in base.search(question["text"], 20) if hit.source in sources]
        if hits:
            yield question, hits[:4]


def sentences_of(tool, hit):
    """Return the sentences of a hit that state something."""
    spans = tool.sentences(hit.text)
    found = [hit.text[start:end] for start, end in spans]
    low, high = (12, 150) if tool.language(hit.text) == "zh" else (40, 300)
    return [s for s in found if low <= len(s) <= high and s[-1] in ".。！!;；"]


def change_number(rng, sentence, names):
    """Return a sentence with another number, or None."""
    found = [*DIGITS.finditer(sentence), *CHINESE.finditer(sentence)]
    if not found:
        return None
    match = rng.choice(found)
    if match[0] in SIGNS:
        new = rng.choice([sign for sign in SIGNS[1:] if sign != match[0]])
    else:
        new = str(int(match[0]) + rng.choice([1, 2, 7, 10, 30, 100]))
    return sentence[: match.start()] + new + sentence[match.end() :]


def change_name(rng, sentence, names):
    """Return a sentence with another name in the place of one, or None."""
    english = sentence.isascii()
    fit = [name for name in names if name.isascii() == english]
    known = [n for n in (NAME_EN.findall(sentence) if english else fit) if n in sentence]
    others = [name for name in fit if name not in sentence]
    if not known or not others:
        return None
    name = rng.choice(known)
    near = [n for n in others if abs(len(n) - len(name)) <= 2] or others
    return re.sub(rf"(?<!^){name}", rng.choice(near), sentence, flags=re.ASCII)


def add_negation(rng, sentence, names):
    """Return a sentence that denies what it said, or None."""
    english = VERB_EN.search(sentence)
    if english:
        return f"{sentence[:english.end()]} not{sentence[english.end():]}"
    chinese = VERB_ZH.search(sentence)
    if chinese:
        word = "没" if sentence[chinese.start()] == "有" else "不"
        return sentence[: chinese.start()] + word + sentence[chinese.start() :]
    return None


CHANGES = {"number": change_number, "name": change_name, "negation": add_negation}


def names_in(tool, rows):
    """Return names that occur: in Chinese the answers to who and which, in English
    words with capitals that do not begin a sentence."""
    names = set()
    for question, hit in rows:
        answers = question.get("answers", ())
        if ASKS_NAME.search(question["text"]):
            names.update(a for a in answers if 2 <= len(a) <= 8 and a.isalpha()
                         and a in hit.text and not a.isascii())
        names.update(NAME_EN.findall(hit.text))
    return sorted(names)


def pairs_of(tool, rows, kind, most, rng):
    """Return [(true sentence, its hit, falsified sentence, its hit)] of one kind."""
    names, pairs = names_in(tool, rows), []
    for question, hit in rows:
        for sentence in rng.sample(found := sentences_of(tool, hit), len(found)):
            if kind == "source":
                other = rng.choice([h for _, h in rows if h.source != hit.source])
                pairs.append((sentence, hit, sentence, other))
                break
            changed = CHANGES[kind](rng, sentence, names)
            if changed and changed != sentence and not _still_true(changed, hit):
                pairs.append((sentence, hit, changed, hit))
                break
        if len(pairs) == most:
            break
    return pairs


def _still_true(changed, hit):
    return changed in hit.text


def print_kinds(tool, name, rows, base, most):
    """Print a row of figures for each kind; -> {kind: (right, wrong, missed)}."""
    counts = {}
    for kind in ("number", "name", "source", "negation"):
        pairs = pairs_of(tool, rows, kind, most, random.Random(f"{name} {kind}"))
        wrong = [(s, tool.why_unsupported(s, [hit], base.idf)) for s, hit, *_ in pairs]
        right = [(s, tool.why_unsupported(s, [hit], base.idf)) for *_, s, hit in pairs]
        false = [row for row in wrong if row[1]]
        missed = [row for row in right if not row[1]]
        counts[kind] = len(pairs) - len(missed), len(false), len(missed)
        print_row(name, kind, counts[kind])
        if os.environ.get("SHOW"):
            for text, why in false[:4]:
                print("   false:", why, "|", text.replace("\n", " ")[:150])
            for (_, _, text, hit), (_, why) in zip(pairs, right):
                if not why:
                    print("   missed:", text.replace("\n", " ")[:150])
    return counts


def print_row(name, kind, counts):
    """Print precision and recall of (right, wrong, missed)."""
    right, wrong, missed = counts
    pairs = right + missed
    if pairs:
        precision = right / (right + wrong) if right + wrong else 1.0
        print(f"{name:10} {kind:9} {pairs:5} {precision:9.3f} {right / pairs:7.3f}",
              flush=True)


def print_own_words(tool, name, rows, base):
    """Print the share of answers in a writer's own words that pass."""
    answers = [
        (answer[start:end], hits) for question, hits in rows
        for answer in question.get("answers", ())
        for start, end in tool.sentences(answer) if len(tool.tokens(answer)) >= 8
    ]
    if len(answers) >= 20:
        verdicts = [(tool.why_unsupported(a, hits, base.idf), a) for a, hits in answers]
        passed = sum(not why for why, _ in verdicts) / len(verdicts)
        print(f"{name:10} own words {len(answers):5} pass {passed:.3f}")
        if os.environ.get("SHOW"):
            for why, text in verdicts:
                if why:
                    print("   own:", why, "|", text.replace("\n", " ")[:200])


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--set", nargs="*", default=list(SETS))
    parser.add_argument("--tool", default=os.path.join(HERE, "..", "lightrag.py"))
    options = parser.parse_args()
    tool, totals = load_tool(options.tool), {}
    print("set        kind      pairs precision  recall")
    for name in options.set:
        folder = os.path.join(options.sets, name)
        base = build(tool, folder)
        found = list(answering_passages(tool, folder, base, options.pairs * 4))
        rows = [(question, hits[0]) for question, hits in found]
        for kind, counts in print_kinds(tool, name, rows, base, options.pairs).items():
            totals[kind] = [*map(sum, zip(totals.get(kind, (0, 0, 0)), counts))]
        print_own_words(tool, name, found, base)
    for kind, counts in totals.items():
        print_row("all", kind, counts)


if __name__ == "__main__":
    main()
