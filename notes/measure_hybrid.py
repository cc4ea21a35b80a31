#!/usr/bin/env python3
"""Measure search by words, by vectors and by both on judged sets.

    EMBEDDING_BASE_URL=http://127.0.0.1:18090/v1 LRAG_EMBEDDING_PREFIX=input_type \\
        python3 notes/measure_hybrid.py SETS CACHE [--set zh_faq ...] [--questions 250]

SETS is a folder of judged sets.  CACHE keeps the vectors of each set, of its questions
too, so that a run can be stopped and goes on.  With --whole, only sets whose vectors
are all there already are measured, and no endpoint is asked.

--rerank adds a row with a reranker on loopback.  No cross-encoder could be had for
these figures: it scores a passage by the cosine of its nearest two sentences, asked of
the embeddings endpoint, so it shows what the way there is worth and little more.
--pick adds a row with the chat model of OPENAI_BASE_URL, --expand one with its variants.
--refusals measures instead, at several thresholds, how often `ask` answers without a
model: the questions of a set (answered) and 120 of other sets (refused).
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from calibrate import load_tool

SETS = ("zh_faq", "en_docs", "code_ant", "xling_zh2en")
FOREIGN = {         # base -> the sets whose questions it cannot answer
    "zh_faq": ("en_docs", "en_squad", "en_faq", "zh_cmrc", "zh_drcd"),
    "en_docs": ("zh_faq", "zh_cmrc", "zh_drcd", "xling_zh2en", "en_squad"),
    "code_ant": ("zh_faq", "zh_cmrc", "zh_drcd", "xling_zh2en", "en_squad"),
    "xling_zh2en": ("zh_faq", "zh_cmrc", "zh_drcd", "en_docs", "en_faq"),
}
LEADS = (0.15, 0.18, 0.20, 0.21, 0.22, 0.24, 0.27)


class Kept:
    """Question vectors out of the cache, under the name of their model."""

    def __init__(self, vectors, questions, embedder=None):
        self.model, self._vectors, self._rows = vectors.model, vectors, questions
        self._embedder = embedder       # for the variants of a question

    def question_vector(self, question):
        """Return the vector of a question."""
        if question not in self._rows:
            return self._embedder.question_vector(question)
        self._vectors.settle()
        start = self._rows[question] * self._vectors.dimension
        stored = self._vectors._rows[start : start + self._vectors.dimension]
        return [byte - 128 for byte in stored]      # a scale is nothing to a cosine


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
        if embedder and key not in vectors.rows():
            vectors.add(key, embedder.question_vector(text))
    if embedder:
        tool.save_vectors(folder, vectors)
    known = vectors.rows()
    questions = {text: known.get(tool.text_key("query\0" + text))
                 for text in judged.questions.values()}
    if None in questions.values() or tool.lacking_texts(vectors, rows):
        return None
    return knowledge, vectors, questions


def nearest_part(tool, embedder, known, query, text):
    """Return the cosine of a question with the nearest two sentences of a text."""
    if text not in known:
        spans = tool.sentences(text)
        parts = [text[a[0] : b[1]] for a, b in zip(spans[::2], spans[1::2] or spans)]
        parts, found = parts or [text], {}
        embedder.embed(parts, found.__setitem__)
        known[text] = [tool.unit_vector(found[i] or [0.0]) for i in range(len(parts))]
    asked = tool.unit_vector(embedder.question_vector(query))
    return max(sum(a * b for a, b in zip(asked, unit or ())) for unit in known[text])


def serve_parts(tool, embedder):
    """Serve /rerank on loopback, see the top; -> its address."""
    known = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps({"results": [
                {"index": i, "relevance_score":
                 nearest_part(tool, embedder, known, body["query"], text)}
                for i, text in enumerate(body["documents"])]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def rows_wanted(tool, options, embedder):
    """Return [(name, arguments of a Hybrid)] of the rows of a set."""
    rows = [("words", {"vectors": None}), ("vectors", {"alone": True}), ("hybrid", {})]
    settings = tool.read_settings(os.environ, {})
    adviser = tool.Adviser(settings, lambda: tool.Model(settings))
    if options.rerank:
        address = serve_parts(tool, embedder)
        settings = settings._replace(rerank_base_url=address)
        rows.append(("rerank", {"rerank": tool.Reranker(settings, str)}))
    if options.pick:
        rows.append(("pick", {"rerank": adviser}))
    if options.expand:
        rows.append(("expand", {"expand": adviser.variants}))
    return rows


def show_refusals(tool, name, folder, ready, embedder, sets):
    """Print what is answered of a set's own questions, and refused of others'."""
    knowledge, vectors, questions = ready
    foreign = {}
    for other in FOREIGN[name]:
        judged = chosen(tool, tool.read_set(os.path.join(sets, other)), 120)
        foreign[other] = list(judged.questions.values())
        for text in foreign[other]:
            key = tool.text_key("query\0" + text)
            if key not in vectors.rows():
                vectors.add(key, embedder.question_vector(text))
    tool.save_vectors(folder, vectors)
    known = vectors.rows()
    every = {text: known[tool.text_key("query\0" + text)]
             for texts in foreign.values() for text in texts}
    found = {}
    for text in (*questions, *every):
        hybrid = tool.Hybrid(knowledge, vectors, Kept(vectors, {**every, **questions}))
        found[text] = outcome(tool, hybrid, text)
    for least in (9.0, *LEADS):
        own = [found[text] >= least for text in questions]
        rows = [f"{other} {1 - sum(found[t] >= least for t in texts) / len(texts):.3f}"
                for other, texts in foreign.items()]
        said = "words" if least == 9.0 else f"{least:.2f}"
        print(f"{name:12} {said:6} {sum(own) / len(own):8.3f}  {'  '.join(rows)}",
              flush=True)


def outcome(tool, hybrid, question):
    """Return 10 when words answer a question, else the lead of a hit that could."""
    hits = hybrid.search(question, tool.HITS)
    coverage, _ = tool.best_excerpts(question, hits, hybrid.knowledge.idf)
    if coverage >= tool.coverage_needed(hybrid.knowledge.idf):
        return 10.0
    shown, leads = {(hit.source, hit.chunk) for hit in hits}, [0.0]
    for place, (_, lead) in hybrid.leaders.items():
        [hit] = hybrid.knowledge.hits_at([(lead, *place)])
        if (hit.source, hit.chunk) in shown and tool.language(hit.text) != tool.language(
                question):
            leads.append(lead)
    return max(leads)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("cache")
    parser.add_argument("--set", nargs="*", default=list(SETS))
    parser.add_argument("--questions", type=int, default=250)
    for flag in ("--whole", "--rerank", "--pick", "--expand", "--refusals"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--tool", default=os.path.join(HERE, "..", "lightrag.py"))
    options = parser.parse_args()
    tool = load_tool(options.tool)
    settings = tool.read_settings(os.environ, {})
    if not (options.whole or settings.embedding_base_url):
        parser.error("no embeddings endpoint: set EMBEDDING_BASE_URL, or take --whole")
    if (options.pick or options.expand) and not settings.base_url:
        parser.error("--pick and --expand want a chat model: set OPENAI_BASE_URL")
    embedder = None if options.whole else tool.Embedder(settings)
    rows = rows_wanted(tool, options, embedder)
    print("set          from   answered  refused of each" if options.refusals else
          "set          mode     questions     R4    R10  MRR10 nDCG10")
    for name in options.set:
        judged = tool.read_set(os.path.join(options.sets, name))
        judged = chosen(tool, judged, options.questions)
        ready = prepared(tool, judged, os.path.join(options.cache, name), embedder)
        if not ready:
            print(f"{name:12} (not all vectors are there)")
            continue
        knowledge, vectors, questions = ready
        if options.refusals:
            folder = os.path.join(options.cache, name)
            show_refusals(tool, name, folder, ready, embedder, options.sets)
            continue
        for mode, fields in rows:
            kept = Kept(vectors, questions, embedder)
            hybrid = tool.Hybrid(**{"knowledge": knowledge, "vectors": vectors,
                                    "embedder": kept, "notify": print, **fields})
            found = tool.run_set(judged, hybrid.search)
            figures = " ".join(f"{found[key]:6.3f}" for key in
                               ("R4", "R10", "MRR10", "nDCG10"))
            print(f"{name:12} {mode:8} {len(judged.questions):9} {figures}", flush=True)


if __name__ == "__main__":
    main()
