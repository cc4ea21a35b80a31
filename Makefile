PYTHON ?= python3

.PHONY: check test test-all lint demo bench clean

check:          # what CI runs
	bash .ci/run

test:           # nothing but Python needed
	$(PYTHON) test_lightrag.py

test-all:       # every Python 3.9 to 3.13 that is found
	bash .ci/run pythons

lint:
	bash .ci/run lint

demo:           # a question about the notes, in a throw-away knowledge base
	$(PYTHON) lightrag.py --home .lightrag/demo ask --add notes --yes "历史压缩的触发阈值是多少？"

bench:          # quality and speed beside other engines; writes the tables of notes/
	$(PYTHON) notes/bench.py

clean:
	rm -rf .lightrag __pycache__ .ruff_cache
