"""RecordIO. Read `frame` (the bytes), `file`, `index` (random access), `io` (readers and writers), `image_header`."""
