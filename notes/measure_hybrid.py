#!/usr/bin/env python3
"""Measure search by words, by vectors and by both on judged sets.

    EMBEDDING_BASE_URL=http://127.0.0.1:18090/v1 LRAG_EMBEDDING_PREFIX=input_type \\
        python3 notes/measure_hybrid.py SETS CACHE [--set zh_faq ...] [--questions 250]

SETS is a folder of judged sets.  CACHE keeps the vectors of each set, of its questions
too, so that a run can be stopped and goes on.  With --whole, only sets whose vectors
are all there already are measured, and no endpoint is asked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from calibrate import load_tool

SETS = ("zh_faq", "en_docs", "code_ant", "xling_zh2en")


class Kept:
    """Question vectors out of the cache, under the name of their model."""

    def __init__(self, vectors, questions):
        self.model, self._vectors, self._rows = vectors.model, vectors, questions

    def question_vector(self, question):
        """Return the vector of a question."""
        return self._vectors.get(self._rows[question])


def chosen(tool, judged, most):
    """Return the same questions each time, spread over the set."""
    def _digest(name):
        return hashlib.md5(name.encode()).hexdigest()
    names = sorted(judged.questions, key=_digest)[:most]
    return judged._replace(questions={name: judged.questions[name] for name in names})


def prepared(tool, judged, folder, embedder):
    """Return (Knowledge, Vectors, {question: row}); None where vectors are missing."""
    knowledge = tool.knowledge_of(judged)
    rows, model = tool.texts_of(knowledge), embedder.model if embedder else "kept"
    vectors = tool.starting_vectors(folder, model)
    if not embedder:
        vectors = tool.load_vectors(folder)[0] or vectors
    if tool.lacking_texts(vectors, rows) and embedder:
        tool.embed_missing(vectors, rows, embedder,
                           lambda found: tool.save_vectors(folder, found))
    for text in judged.questions.values():
        key = tool.text_key("query\0" + text)
        if embedder and key not in vectors.numbers():
            vectors.add(key, embedder.question_vector(text))
    if embedder:
        tool.save_vectors(folder, vectors)
    known = vectors.numbers()
    questions = {text: known.get(tool.text_key("query\0" + text))
                 for text in judged.questions.values()}
    if None in questions.values() or tool.lacking_texts(vectors, rows):
        return None
    return knowledge, vectors, questions


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("cache")
    parser.add_argument("--set", nargs="*", default=list(SETS))
    parser.add_argument("--questions", type=int, default=250)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--tool", default=os.path.join(HERE, "..", "lightrag.py"))
    options = parser.parse_args()
    tool = load_tool(options.tool)
    embedder = None if options.whole else tool.Embedder(
        tool.read_settings(os.environ, {}))
    print("set          mode     questions     R4    R10  MRR10 nDCG10")
    for name in options.set:
        judged = tool.read_set(os.path.join(options.sets, name))
        judged = chosen(tool, judged, options.questions)
        ready = prepared(tool, judged, os.path.join(options.cache, name), embedder)
        if not ready:
            print(f"{name:12} (not all vectors are there)")
            continue
        knowledge, vectors, questions = ready
        for mode in ("words", "vectors", "hybrid"):
            hybrid = tool.Hybrid(knowledge, vectors, Kept(vectors, questions), mode)
            found = tool.run_set(judged, hybrid.search)
            figures = " ".join(f"{found[key]:6.3f}" for key in
                               ("R4", "R10", "MRR10", "nDCG10"))
            print(f"{name:12} {mode:8} {len(judged.questions):9} {figures}", flush=True)


if __name__ == "__main__":
    main()
