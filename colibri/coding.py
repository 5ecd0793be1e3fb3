"""Bodies that come compressed: the content codings of HTTP that a server takes."""

import zlib

from colibri.refused import Refused

CODINGS = {b"": None, b"identity": None, b"gzip": 31, b"x-gzip": 31, b"deflate": 15}  # {name: zlib's window bits}


def decoded(data, coding, reader):
    """Returns the bytes of a body that a coding of CODINGS holds. Of more than reader.max_bytes no more are made."""
    bits = CODINGS[coding]
    if not bits:
        return data
    found = bytearray()
    try:
        while True:  # gzip's files may stand one after another
            stream = zlib.decompressobj(bits)
            found += stream.decompress(data, reader.max_bytes + 1 - len(found))
            if len(found) > reader.max_bytes:
                raise reader.too_long(b"", "body")
            if not stream.eof:
                raise Refused("body", f"{coding.decode()} without its end", "all of it")
            data = stream.unused_data
            if data and coding == b"deflate":
                raise Refused("body", f"{len(data)} bytes after deflate's end", "none")
            if not data:
                return bytes(found)
    except zlib.error:
        raise Refused("body", f"no {coding.decode()}", "what Content-Encoding says",
                      "compress it, or leave that out") from None
