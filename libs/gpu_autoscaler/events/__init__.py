"""Facts: what happened, in the past tense. One module per domain; `catalog.py` lists them all."""
