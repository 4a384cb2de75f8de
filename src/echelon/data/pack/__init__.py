"""Creating record files, and extracting images from them.

Read `lists` (.lst files), `im2rec` (packs the images of a list), `convert` (converts published sets), then `extract`.
"""
