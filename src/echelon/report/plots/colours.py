"""The colour of each distributed store, the same in every plot and page."""

from __future__ import annotations

from collections.abc import Sequence

STORE_COLOURS = {
    "dist_sync": "#2f6db3",
    "dist_async": "#c23b3b",
    "dist_ssync": "#d9822b",
    "dist_gsync": "#3a9a5b",
}
# For what has no store's colour: the second run with the same store, or a store without servers.
OTHER_COLOURS = ("#7a5fb0", "#1f8a94", "#a8577e", "#8a7a2c", "#5b6b7c", "#b0603a", "#4d7f3f", "#3f5fa8")


def run_colours(stores: Sequence[str | None]) -> list[str]:
    """Return one colour per run: that of its store for the first run with it, and another one for the others."""
    colours: list[str] = []
    used = 0
    for store in stores:
        colour = STORE_COLOURS.get(store or "")
        if colour is None or colour in colours:
            colour = OTHER_COLOURS[used % len(OTHER_COLOURS)]
            used += 1
        colours.append(colour)
    return colours
