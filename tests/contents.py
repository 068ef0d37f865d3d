"""What files hold: of tensors not the note beside them, which has the ledger, and so its id."""

from pathlib import Path

from safetensors.torch import load_file


def content(path: Path) -> bytes | dict[str, bytes]:
    """All bytes of a file, or those of each of its tensors."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def summaries(run: Path) -> str:
    """All that the summaries of a run say that may be shared."""
    found = [
        file for file in run.rglob("done.json") if "private" not in file.relative_to(run).parts
    ]
    assert run / "done.json" in found
    return "".join(file.read_text() for file in found)
