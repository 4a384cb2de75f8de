"""Data: from files to batches.

records/  RecordIO files: the container, its index, image headers        images/   decode and augment one image
pack/     make record files: lists, im2rec, convert, extract             loading/  order, sharding, loaders, batches
sets/     data sets by name: where their files are, downloads
"""
