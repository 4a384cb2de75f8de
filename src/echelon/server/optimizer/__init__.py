"""The optimizers of a server as kernels, which update pieces of memory in place.

Read `kernel` (what a kernel is), `kernels` (updates of pieces of memory), `class_kernels` (classes of torch.optim and
users' own), `row_kernels` (sparse gradients) and `settings` (checks of what workers send).
"""
