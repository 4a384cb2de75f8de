"""The page of one or several runs: a single HTML file that needs no network and no JavaScript.

Read `html` (elements, which escape their text), `drawing` (a chart as SVG and HTML), `tables`, `sections` (what a page
shows, in order) and `page` (the whole file). `style.css` has light and dark colours.
"""
