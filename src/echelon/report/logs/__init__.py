"""The figures of training logs: MXNet's log lines of every version, and Echelon's, which are those of MXNet 1.9.

Read `lines` (what one line says), `files` (the lines of a file), `epochs` (the figures of all workers, by epoch), then
`text` (Markdown, CSV, JSON). The writer of these lines is `train/log_lines.py`.
"""
