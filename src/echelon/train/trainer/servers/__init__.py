"""The Trainer whose optimizer runs on servers.

Read `trainer`, then `bucket` (what is pushed together), `weights` (new weights, and edits by the loop), `loop_watch`
with `gradients` and `overlap` (what the loop does between backward and step), `lazy_pull`, `factors` (smaller pushes of
large linear layers) and `sparse_rows` (tables of embeddings).
"""
