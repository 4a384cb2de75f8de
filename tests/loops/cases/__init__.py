"""The loops, by theme. The order is that of the table in the documentation."""

THEMES = {
    "the_step": "The step",
    "optimizer_as_object": "The optimizer as an object",
    "reads_of_weights": "Reading weights between steps",
    "writes_of_weights": "Changing weights between steps",
    "settings": "Changing settings of the optimizer",
    "gradients": "Reading and changing gradients",
    "clipping": "Clipping and loss scaling",
    "optimizers": "Optimizers",
    "several_models": "Several models and optimizers",
    "parameters": "Kinds of parameters",
    "architectures": "Models",
    "precision": "Precision",
    "sparse": "Sparse gradients",
    "data_and_ends": "Data, and how a loop ends",
    "starts": "How training starts, and what workers share",
    "saving_and_resuming": "Saving and resuming",
}
