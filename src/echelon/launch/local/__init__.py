"""The local launcher: child processes of this machine (`launcher`).

Python programs are forked (`forked`) from one process that has imported torch (`preload`), and run as `python` would
run them (`run_as_python`).
"""
