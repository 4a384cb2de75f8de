"""Pictures of runs, drawn with matplotlib: `curves` (`curves.png` of a run)."""
