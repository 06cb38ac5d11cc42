"""A model's own nested dicts from {path: array}, without the library."""


def keys_of(path):
    return tuple(int(part) if part.isdigit() else part for part in path.split("/"))


def nested(flat):
    tree = {}
    for path, x in flat.items():
        *above, last = keys_of(path)
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = x
    return tree
