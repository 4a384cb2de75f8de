"""The `echelon` command: `main` finds the sub-command, and each sub-command has a module of its name."""
