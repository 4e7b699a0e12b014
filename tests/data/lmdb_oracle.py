"""Reads the database that LmdbWriter wrote, by what docs/data.md says of it, and writes another: ours theirs"""

import json
import struct
import sys

import lmdb
import numpy

ours, theirs = sys.argv[1:]

with lmdb.open(ours, subdir=False, readonly=True, lock=False) as database, database.begin() as records:
    count = records.stat()["entries"]
    total = 0
    for number in range(count):
        record = records.get(struct.pack(">Q", number))
        (header_bytes,) = struct.unpack_from("<Q", record)
        header = json.loads(record[8 : 8 + header_bytes])
        begin, end = (8 + header_bytes + offset for offset in header["data"]["data_offsets"])
        assert header["data"]["dtype"] == "F32", header
        data = numpy.frombuffer(record[begin:end], dtype="<f4").reshape(header["data"]["shape"])
        assert data.shape == (2, 3), data.shape
        total += data.sum()
    print(count, total)

with lmdb.open(theirs, map_size=1 << 20) as database, database.begin(write=True) as records:
    for number in range(12):
        value = numpy.full(3, number, dtype="<i8")
        header = json.dumps({"data": {"dtype": "I64", "shape": [3], "data_offsets": [0, value.nbytes]}}).encode()
        records.put(f"{number:04}".encode(), struct.pack("<Q", len(header)) + header + value.tobytes())
