"""The instrument: what to measure (`spec`), doing it (`runner`), keeping it (`store`), reading it.

Owns nothing itself and imports nothing: `store`, `stats`, `tables` and `figures` need neither torch
nor transformers, so a result can be read and redrawn on a laptop. Read next: `spec.py`, then
`runner.py`.
"""
