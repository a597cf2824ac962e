"""Write records as lines of a file."""

import json

USER = {"role": "user", "content": "¿2+2?"}


def said(**numbers):
    return {"role": "assistant", "content": "4", **numbers}


def line(name="a", **more):
    return json.dumps({"id": name, "messages": [USER, said()], **more}, ensure_ascii=False).encode()


def save(folder, data, name="runs.jsonl"):
    path = folder / name
    path.write_bytes(data)
    return path
