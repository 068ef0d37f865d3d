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
    """Write the file, and say what in it is not as it was."""
    if (DATA / name).exists():
        print("\n".join([name, *changes(read(name), json.loads(json.dumps(content)))]))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    # Without a time, so that what did not change gives the same file.
    (DATA / name).write_bytes(gzip.compress(data, 9, mtime=0) if name.endswith(".gz") else data)


def changes(before: object, after: object, place: str = "") -> list[str]:
    """Where two contents differ, down to the fifth name."""
    if before == after:
        return []
    if not (isinstance(before, dict) and isinstance(after, dict)) or place.count("/") == 5:
        return [f"  {place}"]
    names = sorted({*before, *after})
    return [
        line
        for name in names
        for line in changes(before.get(name), after.get(name), f"{place}/{name.replace('/', ':')}")
    ]
