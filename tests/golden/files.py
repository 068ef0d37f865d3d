"""The frozen numbers: JSON, compressed where it is long."""

import gzip
import json
from pathlib import Path

DATA = Path(__file__).parent / "data"


def read(name: str) -> dict:
    path = DATA / name
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)


def write(name: str, content: dict) -> None:
    DATA.mkdir(exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    # Without a time, so that what did not change gives the same file.
    (DATA / name).write_bytes(gzip.compress(data, 9, mtime=0) if name.endswith(".gz") else data)
