"""The MXNet side of test_recordio_mxnet.py: runs in MXNet's interpreter, reads a JSON request, prints a reply."""

import json
import runpy
import sys
import types
from typing import Any


def write(mx: Any, request: dict[str, Any]) -> list[str]:
    """Write payloads with keys, and image records, with MXNet's own classes."""
    records = mx.recordio.MXIndexedRecordIO(request["idx"], request["rec"], "w")
    for key, payload in request["payloads"]:
        records.write_idx(key, bytes.fromhex(payload))
    records.close()
    headers = [mx.recordio.IRHeader(0, label, key, 0) for label, key in request["headers"]]
    return [mx.recordio.pack(header, b"image").hex() for header in headers]


def read(mx: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Read a file in order, and by key from the last to the first."""
    plain = mx.recordio.MXRecordIO(request["rec"], "r")
    in_order = [payload.hex() for payload in iter(plain.read, None)]
    plain.close()
    indexed = mx.recordio.MXIndexedRecordIO(request["idx"], request["rec"], "r")
    by_key = {str(key): indexed.read_idx(key).hex() for key in reversed(indexed.keys)}
    indexed.close()
    return {"in_order": in_order, "by_key": by_key}


def unpack(mx: Any, request: dict[str, Any]) -> list[Any]:
    """Return (labels, id, image) of each record."""
    answer = []
    for record in request["records"]:
        header, image = mx.recordio.unpack(bytes.fromhex(record))
        label = header.label.tolist() if header.flag else header.label
        answer.append([label, header.id, image.hex()])
    return answer


def iterate(mx: Any, request: dict[str, Any]) -> list[list[float]]:
    """Return the label and mean of every image that ImageRecordIter yields."""
    batches = mx.io.ImageRecordIter(
        path_imgrec=request["rec"],
        path_imgidx=request["idx"],
        data_shape=(3, 16, 16),
        batch_size=1,
        preprocess_threads=1,
    )
    return [[float(batch.label[0].asscalar()), float(batch.data[0].mean().asscalar())] for batch in batches]


def lists(mx: Any, request: dict[str, Any]) -> None:
    """Run MXNet's im2rec --list, which imports OpenCV only for packing and writes lists without it."""
    sys.modules.setdefault("cv2", types.ModuleType("cv2"))
    sys.argv = ["im2rec.py", "--list", "--recursive", *request["arguments"]]
    runpy.run_path(f"{mx.__path__[0]}/tools/im2rec.py", run_name="__main__")


if __name__ == "__main__":
    import mxnet

    asked = json.load(sys.stdin)
    answered = {f.__name__: f for f in (write, read, unpack, iterate, lists)}[asked["do"]](mxnet, asked)
    print("\n" + json.dumps(answered))
