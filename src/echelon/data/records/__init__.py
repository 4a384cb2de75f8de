"""RecordIO files (.rec) and their indexes (.idx). Import what you need from here:

    from echelon.data.records import Header, IndexedReader, IndexedWriter, Reader, Writer, pack, unpack

Read `frame` (the bytes of a record), `image_header` (label and id of an image), `file` (a file mapped into memory, and
its index), then `readers`, `writers` and `check` (verify and describe a file).
"""

from echelon.data.records.file import RecordError, index_path, read_index
from echelon.data.records.image_header import Header, pack, unpack
from echelon.data.records.readers import IndexedReader, Reader
from echelon.data.records.writers import IndexedWriter, Writer

__all__ = [
    "Header",
    "IndexedReader",
    "IndexedWriter",
    "Reader",
    "RecordError",
    "Writer",
    "index_path",
    "pack",
    "read_index",
    "unpack",
]
