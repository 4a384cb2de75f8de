"""Data sets by name. Read `datasets` (the table), `find` and `layouts` (their files), `published` (downloads)."""
