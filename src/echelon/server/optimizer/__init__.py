"""The optimizer of a server: `optimization` (which kernel updates which keys), kernels, and states.

Read `kernel` (what a kernel is), `kernels` (updates of pieces of memory), `class_kernels` (classes of torch.optim and
users' own), `row_kernels` (sparse gradients), then `optimization` and `states`.
"""
