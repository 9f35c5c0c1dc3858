"""Read the newest checkpoint of a root without stillframe: json, xxhash and safetensors are enough.

    python read_without_stillframe.py ROOT

Finds the newest checkpoint of the branch, checks every digest (manifest, then seals, then chunks) and gives the
tensors by their paths in the state; those that ranks hold boxes of are put together.  docs/FORMAT.md says why.
"""

import json
import re
import sys
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

STEP = re.compile(r"step-(\d{12})-e(\d{4,7})-([1-9]\d{0,3})")
FAMILIES = {"F": "float", "I": "int", "U": "uint", "BF": "bfloat", "C": "complex"}
OTHERS = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2"}


def read(path: Path, kind: str, digest: str | None = None) -> dict:
    """The body of a record, whose digest is that of its bytes as they stand in the file."""
    text, decoder, at, found = path.read_text(), json.JSONDecoder(), 0, {}
    at = text.index("{") + 1
    while text[at := re.compile(r"[\s,]*").match(text, at).end()] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = re.compile(r"\s*:\s*").match(text, at).end()
        value, at = decoder.raw_decode(text, begin)
        found[key] = value, text[begin:at]
    if found["stillframe"][0] != 1 or found["kind"][0] != kind:
        sys.exit(f"{path} is no {kind} of version 1")
    body, raw = found["body"]
    if not xxhash.xxh3_128_hexdigest(raw.encode()) == found["xxh3_128"][0] == (digest or found["xxh3_128"][0]):
        sys.exit(f"{path} is damaged")
    return body


def newest(root: Path) -> Path:
    """The directory of the newest checkpoint that training, as it was last, came from."""
    saves = {path: tuple(map(int, found.groups())) for path in root.iterdir() if (found := STEP.fullmatch(path.name))}
    there = [path for path in saves if (path / "manifest.json").exists() and not (path / "aside.json").exists()]
    parents = sorted(root.glob("run/e*/parent.json"), key=lambda path: int(path.parent.name[1:]))
    if parents:
        said = read(parents[-1], "parent")
        cuts = {said["epoch"]: float("inf"), **dict(said["lineage"])}
    else:  # only the steps were copied: then their manifests tell
        above = {saves[path][1]: read(path / "manifest.json", "manifest")["parent"] for path in there}
        at, cuts = {"epoch": max(above), "step": float("inf")}, {}
        while at is not None:
            cuts[at["epoch"]] = min([at["step"], *cuts.values()])
            at = above.get(at["epoch"])
    on_branch = [path for path in there if saves[path][0] <= cuts.get(saves[path][1], -1)]
    return max(on_branch, key=lambda path: saves[path])


def open_segment(path: Path, segment: dict) -> safe_open:
    """The tensors of a rank, all of whose bytes have been checked."""
    with path.open("rb") as file:
        pieces = [(segment["data_start"], segment["header"])]
        pieces += [(segment["chunk_bytes"], digest) for digest in segment["chunks"]]
        for size, digest in pieces:
            if xxhash.xxh3_128_hexdigest(file.read(size)) != digest:
                sys.exit(f"{path} is damaged")
    return safe_open(path, framework="pt")


def leaves(node: dict, path: str = ""):
    """Every tensor of a tree, with its path in the state."""
    if node["kind"] in ("tensor", "array", "sharded"):
        yield path[1:], node
    keys = node.get("keys") or node.get("names") or range(len(node.get("items", [])))
    for key, item in [
        *zip(keys, node.get("items", []), strict=True),
        *([("", node["item"])] if "item" in node else []),
    ]:
        name = json.dumps(key) if isinstance(key, dict | list) else str(key)
        yield from leaves(item, path if "item" in node else f"{path}/{name.replace('~', '~0').replace('/', '~1')}")


def as_view(memory: torch.Tensor, view: dict) -> torch.Tensor:
    """A tensor that shares its memory with others: a strided window of the shard."""
    name = view["dtype"]
    dtype = OTHERS.get(name) or re.sub(r"^[A-Z]+", lambda found: FAMILIES[found[0]], name).lower()
    window = torch.empty(0, dtype=getattr(torch, dtype))
    return window.set_(memory.untyped_storage(), view["offset"], view["shape"], view["stride"])


def load(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors by path; those that each of several ranks has for itself with ``@rank`` behind."""
    manifest = read(directory / "manifest.json", "manifest")
    seals, boxes, state = [], {}, {}
    for entry in manifest["ranks"]:
        seal = read(directory / f"seal-{entry['rank']:05d}.json", "seal", entry["seal_digest"])
        file = open_segment(directory / f"rank-{entry['rank']:05d}.safetensors", seal["segment"])
        shards = [file.get_tensor(shard["name"]).clone() for shard in seal["shards"]]
        seals.append((seal, shards))
        for shard, tensor in zip(seal["shards"], shards, strict=True):
            if shard["whole"]:
                boxes.setdefault(shard["whole"]["tensor"], []).append((shard["whole"]["offset"], tensor))
    for seal, shards in seals:
        for path, node in leaves(seal["tree"]):
            if node["kind"] != "sharded":
                tensor = shards[node["shard"]]
                name = path if len(seals) == 1 else f"{path}@{seal['rank']}"
                state[name] = as_view(tensor, node["view"]) if node.get("view") else tensor
            elif path not in state:
                state[path] = torch.empty(node["shape"], dtype=boxes[node["tensor"]][0][1].dtype)
                for offset, box in boxes[node["tensor"]]:
                    place = tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))
                    state[path][place] = box
    return state


if __name__ == "__main__":
    found = newest(Path(sys.argv[1]))
    print(found.name)
    for name, tensor in load(found).items():
        print(f"{name}: {tensor.dtype} {list(tensor.shape)}")
