"""Decoding and augmenting one image.

Read `config` (the augmentation settings), `geometry` (which pixels of the source an augmented image shows), `augment`
(applies both), `decode` with `jpeg_cut` (decodes only the region that is needed), then `colour`.
"""
