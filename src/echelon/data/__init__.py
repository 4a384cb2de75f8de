"""Data: from files to batches. Read the packages in this order:

records/  RecordIO files: read, write, index and check them
images/   decode and augment one image
loading/  which samples come when, and loaders that turn them into batches, on the CPU or on a device
sets/     data sets by name: their files, formats and downloads
pack/     create record files (im2rec, convert) and extract images from them
"""
