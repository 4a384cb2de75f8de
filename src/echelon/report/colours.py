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

GREY = "#8a94a3"
BOUND = "#c23b3b"
PHASE_COLOURS = {"compute": "#2f6db3", "push": "#7a5fb0", "wait": "#d9822b", "pull": "#1f8a94", "other": "#8a94a3"}
# The same hues, readable on a dark page.
DARK = {
    "#2f6db3": "#6aa5e8",
    "#c23b3b": "#ee7b78",
    "#d9822b": "#eda35a",
    "#3a9a5b": "#62c183",
    "#7a5fb0": "#ab93e0",
    "#1f8a94": "#4fbac4",
    "#a8577e": "#d98db1",
    "#8a7a2c": "#c4b25a",
    "#5b6b7c": "#93a4b6",
    "#b0603a": "#dc946f",
    "#4d7f3f": "#86bb76",
    "#3f5fa8": "#869ee0",
    "#8a94a3": "#8a94a3",
}


def worker_colours(count: int, first: int = 0) -> list[str]:
    """Return a colour per worker; they repeat after twelve."""
    all_colours = (*STORE_COLOURS.values(), *OTHER_COLOURS)
    return [all_colours[(first + index) % len(all_colours)] for index in range(count)]


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
