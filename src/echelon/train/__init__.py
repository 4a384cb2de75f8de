"""Training: the Trainer for any loop, and the loop behind `echelon train` and the example scripts.

Read in this order:

    trainer/     `Trainer`: synchronizes a model with servers, with a process group, or with both
    step/        one training step: eager, captured as a CUDA graph, or captured with the update on servers
    recipe/      the settings of a run (`TrainOptions`) and the arithmetic that follows: shares, schedules, optimizers
    checkpoint/  the checkpoint file, its names, and what a run saves and resumes from
    flags/       the command line: MXNet's flags, Echelon's own, and all checks of flags
    loop/        epochs, validation, signals, and the run as a whole
    log_lines.py MXNet's log lines, one function each; Echelon's own are logged where they arise, most in loop/run.py
    predict.py   predictions of a checkpoint     script.py    what the example scripts share
"""
