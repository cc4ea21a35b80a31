#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""Ask questions about documents and code; every answer shows where it comes from.

    python3 lightrag.py add notes                 put a folder into the knowledge base
    python3 lightrag.py search "history limit"    the passages, best first
    python3 lightrag.py ask "历史压缩的触发阈值是多少？"   an answer with citations
    python3 lightrag.py                           the interactive prompt

    files, pages --> documents --> chunks --> index --> hits --> answer with [n]
                                                         ^         |
                                                         +- agent <-> model

The map (a section uses only sections above it; [pure] ones touch no disk, network,
terminal, clock or environment):

     1 Settings      every limit and default, with why
     2 Errors        one base class; what the caller does next decides the class
     3 Text          normalise, tokens, sentences, token estimate, printable text
     4 Outline       where headings, fences and definitions begin and end
     5 Chunks        cut a document into passages that keep their offsets
     6 Ranking       postings, BM25 and the best k
     7 Markup        HTML and XML to text
     8 Documents     bytes to title, kind and text
     9 Answers       numbered sources, extractive answers, refusals
    10 Protocol      the OpenAI wire format: messages, deltas, server-sent events
    11 Permissions   (rules, call) to allow, ask or deny
    12 Paths         ignore rules, secret names, confinement below a root
    13 Files         the only section that touches the disk
    14 Http          the only section that opens connections
    15 Sources       path, folder, glob, URL or standard input to raw documents
    16 Knowledge     the documents and their index
    17 Ingest        plan, ask, add, sync and remove
    18 Memory        long-term facts and the working memory
    19 Model         chat completions over Http and Protocol
    20 Tools         a table of what the agent can do
    21 Agent         the loop; yields events, never prints
    22 Console       printing, asking and progress under any encoding
    23 Commands      one function a command
    24 Prompt        the interactive prompt
    25 Command line  arguments and main

Words: a document has a title, a source (the path or URL it came from) and a text;
a chunk is a passage of it, text[start:end]; a hit is a chunk that a search found;
a citation is a numbered hit; a fact is one long-term memory; a call is a tool call.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

__version__ = "0.1.0"

__all__ = [
]


# =============================================================================
# 1. Settings -- every limit and default, with why [pure]
#    Uses: nothing
# =============================================================================

# Constants stand here under the name of the section that uses them, each with its
# reason.  What a user may change by flag, environment or configuration is a field of
# Settings, read in the last section and handed down.

# Text

# Outline

# Chunks
CHUNK_CHARS_MAX = 800       # characters; what the first users know, and what peers use
CHUNK_OVERLAP = 80          # characters two windows share, so no sentence is lost
WHOLE_CHARS_MAX = 2400      # a definition or a fence stays whole up to this
SENTENCES_PER_CHUNK = 5
SENTENCES_OVERLAP = 1
CODE_LINES_PER_CHUNK = 25   # where code has no outline

# Ranking
HITS = 4                    # passages a question gets when nobody says otherwise
BM25_K1 = 1.2
BM25_B = 0.75

# Markup

# Documents

# Answers

# Protocol

# Permissions

# Paths

# Files

# Http

# Sources

# Knowledge
KNOWLEDGE_FORMAT = "lightrag/knowledge"
KNOWLEDGE_VERSION = 1

# Ingest

# Memory

# Model

# Tools

# Agent

# Console

# Commands

# Prompt


class Settings(NamedTuple):
    """What a user may change: flag beats environment beats user configuration."""

    base_url: str = ""      # OPENAI_BASE_URL or OPENAI_API_BASE; empty = no model
    api_key: str = ""       # OPENAI_API_KEY
    model: str = ""         # OPENAI_MODEL; empty = the first of /models
    fast_model: str = ""    # LRAG_FAST_MODEL; empty = model
    max_steps: int = 6      # tool steps a question; the last goes without tools


# =============================================================================
# 2. Errors -- one base class; what the caller does next decides the class [pure]
#    Uses: nothing
# =============================================================================

# Raised where something is wrong, shown in one place (main), as one sentence: what,
# where, what to do next.  `kind` is the word of the JSON contract.


class LightragError(Exception):
    """The base of every error a user may see; str(error) is one sentence."""

    kind = "storage"
    exit_code = 1


class UsageError(LightragError):
    """The command line, or the arguments of a call, cannot be understood."""

    kind, exit_code = "usage", 2


class NotFoundError(LightragError):
    """What was asked for is not in the knowledge base."""

    kind, exit_code = "not_found", 3


class SourceError(LightragError):
    """One source cannot be read; the others can, so the caller goes on."""

    kind, exit_code = "not_found", 1


class NetworkError(LightragError):
    """A connection failed, timed out or was cut."""

    kind, exit_code = "network", 1


class ModelError(LightragError):
    """The endpoint answered, but not with an answer; the extract still can."""

    kind, exit_code = "model", 1


class ConfigError(LightragError):
    """A setting or a credential is wrong; the message names it."""

    kind, exit_code = "config", 4


class DeniedError(LightragError):
    """Nobody said yes."""

    kind, exit_code = "denied", 5


class LimitError(LightragError):
    """A step, size, time or budget limit ended the work."""

    kind, exit_code = "limit", 6


class StorageError(LightragError):
    """A file of the knowledge base cannot be read or written; nothing was lost."""

    kind, exit_code = "storage", 1


# =============================================================================
# 3. Text -- normalise, tokens, sentences, token estimate, printable text [pure]
#    Uses: nothing
# =============================================================================

def tokens(text):
    """Return the search tokens of a text, in order."""
    out = []
    cjk = r"[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]+"
    for word in re.findall(cjk + r"|\w+", text.lower()):
        if word[0] >= "\u3040" and len(word) > 1:
            out += [word[i : i + 2] for i in range(len(word) - 1)]
        else:
            out.append(word)
    return out


# =============================================================================
# 4. Outline -- where headings, fences and definitions begin and end [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 5. Chunks -- cut a document into passages that keep their offsets [pure]
#    Uses: Settings
# =============================================================================

class Chunk(NamedTuple):
    """A passage: text[start:end], offsets in characters, under a heading path."""

    start: int
    end: int
    heading: str = ""


def cut(text, kind="text", chunker="auto"):
    """Cut a text into chunks."""
    step = CHUNK_CHARS_MAX - CHUNK_OVERLAP
    spans = range(0, max(1, len(text) - CHUNK_OVERLAP), step)
    chunks = [Chunk(s, min(len(text), s + CHUNK_CHARS_MAX)) for s in spans]
    return [c for c in chunks if text[c.start : c.end].strip()]


# =============================================================================
# 6. Ranking -- postings, BM25 and the best k [pure]
#    Uses: Settings, Text
# =============================================================================

class Hit(NamedTuple):
    """A chunk that a search found, with all a face needs to show it."""

    rank: int           # from 1
    source: str
    title: str
    kind: str
    chunk: int          # from 1
    chunks: int         # how many the document has
    heading: str
    start: int          # offsets in characters
    end: int
    line: int           # lines of the stored text, from 1
    end_line: int
    score: float
    stale: bool         # the source has changed since it was added
    text: str


class Index:
    """Finds chunks by BM25; documents are numbers that the caller chooses.

    Ties are broken by document number, then chunk.
    """

    def __init__(self):
        self.units, self.postings = {}, {}

    def add(self, number, title, text, chunks):
        """Index one document; its number must not be in use."""
        self.units[number] = len(chunks)
        for i, chunk in enumerate(chunks):
            for token in tokens(title + "\n" + text[chunk.start : chunk.end]):
                row = self.postings.setdefault(token, {})
                row[number, i] = row.get((number, i), 0) + 1

    def remove(self, number):
        """Forget one document."""
        self.units.pop(number, None)
        for row in self.postings.values():
            for unit in [u for u in row if u[0] == number]:
                del row[unit]

    def search(self, query, k, wanted=None):
        """Return the best k as [(score, number, chunk index)].

        wanted  None, or a callable: number -> bool
        """
        total, scores = sum(self.units.values()), {}
        for token in tokens(query):
            row = self.postings.get(token, {})
            idf = math.log(1 + (total - len(row) + 0.5) / (len(row) + 0.5))
            for unit, tf in row.items():
                if wanted is None or wanted(unit[0]):
                    scores[unit] = scores.get(unit, 0) + idf * tf / (tf + BM25_K1)
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]
        return [(score, number, i) for (number, i), score in best]


# =============================================================================
# 7. Markup -- HTML and XML to text [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 8. Documents -- bytes to title, kind and text [pure]
#    Uses: nothing
# =============================================================================

class Parsed(NamedTuple):
    """What a reader makes of the bytes of one source."""

    title: str
    kind: str           # html, markdown, text, code, rst, notebook, docx, csv, ...
    text: str           # newlines are \\n; no BOM, no NUL, no lone surrogate
    warnings: tuple = ()


class Document(NamedTuple):
    """One document as the knowledge base keeps it."""

    title: str
    source: str
    kind: str
    text: str
    chunks: tuple       # of Chunk
    added_at: str       # UTC, 2026-01-02T03:04:05Z
    sha256: str         # of the raw bytes


def kind_of(name):
    """Return the kind that a file name's suffix stands for, else text."""
    return "text"


def read_document(data, name, content_type="", charset=""):
    """Turn the bytes of one source into a title, a kind and a text.

    data          bytes, the source as it was read
    name          str, file name or address; its suffix tells the kind
    content_type  str, the media type a server declared, or empty
    charset       str, the label a server declared, or empty
    ->            Parsed
    Raises        SourceError when there is nothing to index, or no reader for it
    """
    return Parsed(name, "text", data.decode("utf-8"))


# =============================================================================
# 9. Answers -- numbered sources, extractive answers, refusals [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 10. Protocol -- the OpenAI wire format: messages, deltas, server-sent events [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 11. Permissions -- (rules, call) to allow, ask or deny [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 12. Paths -- ignore rules, secret names, confinement below a root [pure]
#    Uses: nothing
# =============================================================================


# =============================================================================
# 13. Files -- the only section that touches the disk
#    Uses: nothing
# =============================================================================


# =============================================================================
# 14. Http -- the only section that opens connections
#    Uses: nothing
# =============================================================================


# =============================================================================
# 15. Sources -- path, folder, glob, URL or standard input to raw documents
#    Uses: nothing
# =============================================================================


# =============================================================================
# 16. Knowledge -- the documents and their index
#    Uses: nothing
# =============================================================================


# =============================================================================
# 17. Ingest -- plan, ask, add, sync and remove
#    Uses: nothing
# =============================================================================


# =============================================================================
# 18. Memory -- long-term facts and the working memory
#    Uses: nothing
# =============================================================================


# =============================================================================
# 19. Model -- chat completions over Http and Protocol
#    Uses: nothing
# =============================================================================


# =============================================================================
# 20. Tools -- a table of what the agent can do
#    Uses: nothing
# =============================================================================


# =============================================================================
# 21. Agent -- the loop; yields events, never prints
#    Uses: nothing
# =============================================================================


# =============================================================================
# 22. Console -- printing, asking and progress under any encoding
#    Uses: nothing
# =============================================================================


# =============================================================================
# 23. Commands -- one function a command
#    Uses: nothing
# =============================================================================


# =============================================================================
# 24. Prompt -- the interactive prompt
#    Uses: nothing
# =============================================================================


# =============================================================================
# 25. Command line -- arguments and main
#    Uses: nothing
# =============================================================================


if __name__ == "__main__":
    pass
