"""Tests of lightrag.py: standard library only; `python3 test_lightrag.py` runs them.

Class numbers are the section numbers of lightrag.py.  Slow checks (kill loops, real
servers, large trees) run only with LRAG_TEST_SLOW=1, as .ci/run sets it.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "lightrag.py")
SLOW = os.environ.get("LRAG_TEST_SLOW") == "1"


def load(path=FILE, name="lightrag_under_test"):
    """Import the file by its path, as a copy under any name would be."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lr = load()


class Test00File(unittest.TestCase):
    """The file as a whole: its map, its examples."""

    def test_docstring_examples(self):
        failed, _ = doctest.testmod(lr)
        self.assertEqual(failed, 0)


# =============================================================================
# 1. Settings
# =============================================================================


# =============================================================================
# 2. Errors
# =============================================================================


# =============================================================================
# 3. Text
# =============================================================================


# =============================================================================
# 4. Outline
# =============================================================================


# =============================================================================
# 5. Chunks
# =============================================================================


# =============================================================================
# 6. Ranking
# =============================================================================


# =============================================================================
# 7. Markup
# =============================================================================


# =============================================================================
# 8. Documents
# =============================================================================


# =============================================================================
# 9. Answers
# =============================================================================


# =============================================================================
# 10. Protocol
# =============================================================================


# =============================================================================
# 11. Permissions
# =============================================================================

class Test11Permissions(unittest.TestCase):
    """Rules, patterns and the verdict."""

    def test_rules_are_read_and_written_alike(self):
        for text in ("rag_add(notes/*)", "fetch(https://a.test/*)", "*(x)", "t((a))"):
            with self.subTest(text):
                self.assertEqual(str(lr.parse_rule(text, "allow")), text)
        self.assertEqual(lr.parse_rule(" fetch ", "deny"), ("deny", "fetch", "*"))
        self.assertEqual(lr.parse_rule("fetch()", "deny"), ("deny", "fetch", ""))
        self.assertEqual(lr.parse_rule("add(a\nb)", "allow").pattern, "a\nb")

    def test_what_is_no_rule_is_a_usage_error(self):
        for text in ("", "()", "rag add(x)", "rag_add(x", "rag_add)x(", "rm -rf"):
            with self.subTest(text), self.assertRaises(lr.UsageError):
                lr.parse_rule(text, "allow")

    def test_patterns(self):
        cases = [
            ("", "", True), ("", "a", False), ("*", "", True), ("*", "a\nb", True),
            ("a", "a", True), ("a", "ab", False), ("a*", "ab", True), ("*a", "ba", True),
            ("a*a", "a", False), ("a*a", "aa", True), ("ab*bc", "abc", False),
            ("*a*b*", "xaxbx", True), ("*a*b*", "xbxax", False), ("**", "x", True),
            ("notes/*", "notes2/a", False), ("notes/*", "notes/a/b", True),
            ("a?c", "abc", False), ("[ab]", "a", False), ("中*", "中文", True),
            ("https://a.test/*", "https://a.test.evil/", False),
        ]
        for pattern, argument, expected in cases:
            with self.subTest(pattern=pattern, argument=argument):
                self.assertIs(lr.matches(pattern, argument), expected)

    def test_many_stars_stay_quick(self):
        self.assertFalse(lr.matches("*a" * 2000 + "b", "a" * 20000))

    def test_the_strictest_rule_wins_in_any_order(self):
        rules = [lr.Rule(v, "t", "x") for v in ("allow", "ask", "deny")]
        for kept, verdict in ((rules, "deny"), (rules[:2], "ask"), (rules[:1], "allow")):
            for order in (kept, kept[::-1]):
                with self.subTest(order=order):
                    self.assertEqual(lr.decide(order, "t", "x"), verdict)
        self.assertEqual(lr.decide(rules, "other", "x"), "ask")
        self.assertEqual(lr.decide([], "t", "x", default="allow"), "allow")

    def test_configuration_round_trip(self):
        first, second = lr.Rule("allow", "rag_add", "a"), lr.Rule("deny", "*", "b")
        config = lr.with_rule({"other": 1}, "/p", first)
        config = lr.with_rule(lr.with_rule(config, "/p", second), "/p", first)
        self.assertEqual(lr.rules_of(config, "/p"), [second, first])
        self.assertEqual(lr.rules_of(config, "/q"), [])
        self.assertEqual(config["other"], 1)

    def test_damaged_permissions_are_refused_not_half_read(self):
        damaged = (
            [], {"projects": []}, {"projects": {"/p": []}},
            {"projects": {"/p": {"deny": 1}}}, {"projects": {"/p": {"deny": [1]}}},
            {"projects": {"/p": {"deny": ["rag add("]}}},
        )
        for config in damaged:
            with self.subTest(config=config), self.assertRaises(lr.ConfigError):
                lr.rules_of(config, "/p")


# =============================================================================
# 12. Paths
# =============================================================================


# =============================================================================
# 13. Files
# =============================================================================


# =============================================================================
# 14. Http
# =============================================================================


# =============================================================================
# 15. Sources
# =============================================================================


# =============================================================================
# 16. Knowledge
# =============================================================================


# =============================================================================
# 17. Ingest
# =============================================================================


# =============================================================================
# 18. Memory
# =============================================================================


# =============================================================================
# 19. Model
# =============================================================================


# =============================================================================
# 20. Tools
# =============================================================================


# =============================================================================
# 21. Agent
# =============================================================================


# =============================================================================
# 22. Console
# =============================================================================


# =============================================================================
# 23. Commands
# =============================================================================


# =============================================================================
# 24. Prompt
# =============================================================================


# =============================================================================
# 25. Command line
# =============================================================================


if __name__ == "__main__":
    unittest.main()
