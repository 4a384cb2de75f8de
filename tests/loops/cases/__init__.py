"""The loops, by theme. The order is that of the table in the documentation."""

THEMES = {
    "the_step": "The step",
    "reads_of_weights": "Reading weights between steps",
    "writes_of_weights": "Changing weights between steps",
    "settings": "Changing settings of the optimizer",
    "gradients": "Reading and changing gradients",
}
